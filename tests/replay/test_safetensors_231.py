"""safetensors#231 (also mobius#248, ComfyUI#12266, vmlx-swift#376).

Data that is not aligned in the file. It is in memory.
"""

from __future__ import annotations

import numpy as np
import pytest
from checkpoint_files import noise, write

import xds


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("header_padding", range(8))
def test_every_tensor_begins_at_256(tmp_path, framework, header_padding):
    if framework == "torch":
        pytest.importorskip("torch", reason="torch is not installed")
    content = {
        "byte": ("U8", (1,), b"x"),
        "single": ("F32", (3,), np.arange(3, dtype=np.float32).tobytes()),
        "half": ("F16", (3,), np.arange(3, dtype=np.float16).tobytes()),
        "bytes": ("U8", (257,), noise(257)),
        "complex": ("C64", (2,), np.array([1 + 2j, 3], np.complex64).tobytes()),
        "double": ("F64", (5,), np.arange(5.0).tobytes()),
    }
    path = write(tmp_path / "m.safetensors", content, pad_to=1000 + header_padding)
    loaded = xds.load(path, device="cpu", framework=framework)
    for name, (_, _, data) in content.items():
        array = np.asarray(loaded[name])
        assert array.ctypes.data % 256 == 0
        assert array.tobytes() == data
    assert loaded["double"].sum() == 10
