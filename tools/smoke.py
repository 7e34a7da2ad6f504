"""Proves an installed package: import, version, a file and a checkpoint through ``xds://``, the command line.

Run by tools/build-wheel with the interpreter of a clean environment; needs nothing but the package.
"""

from __future__ import annotations

import importlib.metadata
import json
import struct
import subprocess
import sys
import tempfile
from pathlib import Path


def check(holds: bool, what: str) -> None:
    if not holds:
        raise SystemExit(f"smoke: {what}")


def main() -> None:
    import fsspec
    import numpy as np

    import xds
    from xds import native

    check(Path(xds.__file__).is_relative_to(sys.prefix), f"not the installed package: {xds.__file__}")
    check(not {"cupy", "torch"} & set(sys.modules), "importing xds imported a framework")
    native.library()

    with tempfile.TemporaryDirectory() as folder:
        values = np.arange(3 * 1_000_003, dtype=np.float32).reshape(3, -1)
        header = json.dumps(
            {
                "__metadata__": {"a": "b"},
                "w": {"dtype": "F32", "shape": [3, 1_000_003], "data_offsets": [0, values.nbytes]},
            }
        ).encode()
        header += b" " * (-len(header) % 8)
        path = Path(folder, "model.safetensors")
        path.write_bytes(struct.pack("<Q", len(header)) + header + values.tobytes())

        with fsspec.open(f"xds://{path}", "rb") as file:
            file.seek(8)
            check(file.read(len(header)) == header, "bytes read through fsspec differ")
        result = xds.load(f"xds://{path}", device="cpu")
        check(bool(np.array_equal(result["w"], values)), "the tensor differs")
        check(result.report.nbytes == values.nbytes, "the report counts other bytes")
        command = str(Path(sys.executable).with_name("xds"))
        listed = subprocess.run([command, "ls", folder], capture_output=True, text=True, check=True).stdout
        check(listed.strip() == str(path), f"xds ls printed {listed!r}")
        version = subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout
        check(importlib.metadata.version("xpu-direct-storage") in version, f"xds --version printed {version!r}")
    xds.close()
    print(f"smoke: ok with Python {sys.version.split()[0]}, numpy {np.__version__}, fsspec {fsspec.__version__}")


main()
