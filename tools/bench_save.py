#!/usr/bin/env python3
"""Memory of one device into a file: ``writefrom`` beside ``torch.save`` and ``safetensors.torch.save_file``.

All write the same tensor to the same folder, in turn, each to a new file; what it holds is compared once a way,
outside the timing. A run that ends with the bytes in the page cache or in tmpfs is timed as such: nobody syncs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench import machine


def ways(tensor: Any) -> dict[str, Callable[[Path], dict[str, Any] | None]]:
    """Return how each library writes ``tensor`` to a path, by name."""
    import fsspec
    import safetensors.torch
    import torch

    def xds(path: Path) -> dict[str, Any]:
        with fsspec.filesystem("xds").open(str(path), "wb") as file:
            file.writefrom(tensor)
            report: dict[str, Any] = file.report.as_dict()
        return report

    def torch_save(path: Path) -> None:
        torch.save(tensor, path)

    def save_file(path: Path) -> None:
        safetensors.torch.save_file({"tensor": tensor}, path)

    def tofile(path: Path) -> None:
        tensor.cpu().numpy().tofile(path)

    return {"xds writefrom": xds, "torch.save": torch_save, "safetensors save_file": save_file, "cpu().tofile": tofile}


def holds(path: Path, name: str, tensor: Any) -> bool:
    """Whether the file that ``name`` wrote holds the tensor."""
    import numpy as np
    import safetensors.torch
    import torch

    if name == "torch.save":
        found = torch.load(path)
    elif name == "safetensors save_file":
        found = safetensors.torch.load_file(path)["tensor"]
    else:
        found = torch.from_numpy(np.fromfile(path, np.uint8))
    return bool(torch.equal(found.cpu(), tensor.cpu()))


def measure(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Time each way ``repeats`` times after a first one, in turn."""
    import torch

    nbytes = int(args.gib * (1 << 30))
    tensor = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=args.device)
    rows = []
    for name, write in ways(tensor).items():
        seconds, report = [], None
        for _ in range(args.repeats + 1):
            path = folder / "file"
            path.unlink(missing_ok=True)
            if args.device == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
            report = write(path)
            seconds.append(time.perf_counter() - begin)
        rows.append(
            {
                "way": name,
                "nbytes": nbytes,
                "first_s": seconds[0],
                "seconds": seconds[1:],
                "gb_per_s": nbytes / statistics.median(seconds[1:]) / 1e9,
                "exact": holds(folder / "file", name, tensor),
                "report": report,
            }
        )
    return rows


def main(argv: list[str] | None = None) -> int:
    """Measure, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gib", type=float, default=8.0, help="size of the tensor")
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="xds-save-", dir=args.dir) as folder:
        rows = measure(args, Path(folder))
        found = {"machine": machine.describe(), "file_system": machine.file_system(Path(folder)), "rows": rows}
    best = max(row["gb_per_s"] for row in rows[1:3])
    print("| way | first s | median GB/s | over the better of torch and safetensors | bytes |\n|---|---|---|---|---|")
    for row in rows:
        exact = "exact" if row["exact"] else "WRONG"
        print(
            f"| {row['way']} | {row['first_s']:.2f} | {row['gb_per_s']:.2f} | {row['gb_per_s'] / best:.2f} | {exact} |"
        )
    if args.json:
        args.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0 if all(row["exact"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
