"""What the machine itself can do: pinned copies, memcpy, raw reads. Layer: tools.

Reads are measured by ``probe.cpp``, built here with the machine's compiler; copies to the GPU by torch.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench import residency

MIB = 1 << 20
#: Ways to read a cold file: mode, chunk bytes, threads or depth, advise WILLNEED.
COLD_WAYS = (
    ("uring-direct", 1 * MIB, 64, False),
    ("uring-direct", 4 * MIB, 32, False),
    ("uring-direct", 8 * MIB, 8, False),
    ("threads-direct", 1 * MIB, 32, False),
    ("threads-direct", 4 * MIB, 16, False),
    ("threads-buffered", 4 * MIB, 16, False),
    ("threads-buffered", 16 * MIB, 4, False),
    ("threads-buffered", 4 * MIB, 16, True),
)
WARM_WAYS = (
    ("threads-buffered", 1 * MIB, 0, False),
    ("threads-buffered", 2 * MIB, 0, False),
    ("threads-buffered", 4 * MIB, 0, False),
)


def build_probe(folder: Path) -> Path | str:
    """Compile the probe; return its path, or the reason why there is none."""
    compiler = next((found for name in ("g++", "c++", "clang++") if (found := shutil.which(name))), None)
    if compiler is None:
        return "no C++ compiler on this machine"
    target = folder / "probe"
    command = [compiler, "-O2", "-std=c++20", "-pthread", str(Path(__file__).with_name("probe.cpp")), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return target if done.returncode == 0 else f"the probe does not compile: {done.stderr[-500:]}"


def _run(probe: Path, *arguments: object, timeout_s: float = 60) -> dict[str, Any]:
    command = [str(probe), *(str(argument) for argument in arguments)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)
        answer: dict[str, Any] = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, json.JSONDecodeError) as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    return answer


def _read(probe: Path, paths: list[Path], way: tuple[str, int, int, bool]) -> dict[str, Any]:
    mode, chunk, width, willneed = way
    width = width or len(os.sched_getaffinity(0))
    answer = _run(probe, mode, chunk, width, int(willneed), *paths)
    return {"mode": mode, "chunk_nbytes": chunk, "width": width, "willneed": willneed, **answer}


def _key(row: Mapping[str, Any]) -> tuple[str, int, int, bool]:
    return row["mode"], row["chunk_nbytes"], row["width"], row["willneed"]


def cold_reads(
    probe: Path, paths: list[Path], *, again: int = 2, ways: list[Any] | None = None
) -> list[dict[str, Any]]:
    """Read cold files in every way once, then the best direct and the best buffered way ``again`` more times."""
    rows = []
    for way in ways or COLD_WAYS:
        before = residency.make_cold(paths)
        rows.append({**_read(probe, paths, way), "resident_before": before})
    best = best_ways(rows)
    for _ in range(again):
        for way in best:
            before = residency.make_cold(paths)
            rows.append({**_read(probe, paths, way), "resident_before": before})
    return rows


def _medians(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row a way, its rate the median; only of the ways measured most often."""
    groups: dict[tuple[str, int, int, bool], list[dict[str, Any]]] = {}
    for row in rows:
        if "bytes_per_s" in row:
            groups.setdefault(_key(row), []).append(row)
    most = max((len(group) for group in groups.values()), default=0)
    return [
        {**group[0], "bytes_per_s": statistics.median(row["bytes_per_s"] for row in group), "samples": most}
        for group in groups.values()
        if len(group) == most
    ]


def best_ways(rows: list[dict[str, Any]]) -> list[tuple[str, int, int, bool]]:
    """Return the fastest direct and the fastest buffered way among ``rows``."""
    medians = _medians(rows)
    best = []
    for kind in ("direct", "buffered"):
        good = [row for row in medians if row["mode"].endswith(kind)]
        if good:
            best.append(_key(max(good, key=lambda row: float(row["bytes_per_s"]))))
    return best


def best_read(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the way with the best median, with that median as ``bytes_per_s``; of ways measured most often."""
    return max(_medians(rows), key=lambda row: float(row["bytes_per_s"]), default=None)


def warm_reads(probe: Path, paths: list[Path]) -> list[dict[str, Any]]:
    """Read resident files by a thread a CPU into small buffers: the CPUs' copying rate."""
    return [_read(probe, paths, way) for _ in range(2) for way in WARM_WAYS]


def memory_copies(probe: Path, nbytes: int) -> list[dict[str, Any]]:
    """Measure memcpy with 1, 4, 8 and 16 threads (as far as there are CPUs)."""
    cpus = len(os.sched_getaffinity(0))
    counts = sorted({count for count in (1, 2, 4, 8, 16) if count <= cpus})
    return [{"threads": count, **_run(probe, "memcpy", nbytes, count)} for count in counts]


def pinned_copies(arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Measure copies from pinned memory to the GPU by size; run in a process of its own."""
    import torch

    largest = max(arguments["sizes"])
    source = torch.empty(largest, dtype=torch.uint8, pin_memory=True)
    target = torch.randint(0, 256, (largest,), dtype=torch.uint8, device="cuda")
    source.copy_(target)
    rows = []
    for size in arguments["sizes"]:
        count = max(1, min(64, largest // size))
        seconds = []
        for round_ in range(arguments["repeats"] + 1):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            begin.record()
            for index in range(count):
                at = index * size
                target[at : at + size].copy_(source[at : at + size], non_blocking=True)
            end.record()
            end.synchronize()
            if round_:
                seconds.append(begin.elapsed_time(end) / 1e3)
        rate = count * size / statistics.median(seconds)
        rows.append({"nbytes": size, "bytes_per_s": rate, "best_bytes_per_s": count * size / min(seconds)})
    return rows


def scratch() -> tempfile.TemporaryDirectory[str]:
    """Return a temporary folder for the built probe."""
    return tempfile.TemporaryDirectory(prefix="bench-")
