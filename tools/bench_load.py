#!/usr/bin/env python3
"""File bytes into GPU memory (or host arrays): XDS and its peers side by side, with the machine's limits.

One run makes the files, measures the limits, lets every loader load every file set in a process of its own, compares
every byte, and prints Markdown tables; ``--json`` keeps everything. Rates are in GB/s of 1e9 bytes. The timed region
starts before the files are opened and ends when all tensors are usable and the device is synchronised; imports, the
CUDA context and format conversions are outside it for all alike. See docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench import data, limits, machine, residency, tables, worker
from bench.loaders import parse_peer

GIB = 1 << 30
MIB = 1 << 20
CUDA_PEERS = (
    "xds", "xds-cupy", "safetensors", "safetensors-prefetch", "instanttensor", "fastsafetensors", "flashpack", "runai",
    "kvikio-raw",
)  # fmt: skip
CPU_PEERS = ("xds-numpy", "xds", "safetensors", "safetensors-owned", "readinto", "readinto-threads")
SHORT_CUDA_PEERS = ("xds", "xds-cupy", "safetensors", "safetensors-prefetch", "instanttensor", "fastsafetensors")


@dataclass(frozen=True, slots=True)
class Case:
    """One file set and how it is read."""

    name: str
    place: str  # "tmpfs" or "disk"
    layout: str
    shards: int
    cache: str  # "memory", "warm" or "cold"
    cuda_peers: tuple[str, ...]


CASES = {
    case.name: case
    for case in (
        Case("tmpfs", "tmpfs", "shards", 4, "memory", CUDA_PEERS),
        Case("first", "tmpfs", "shards", 4, "memory", (*SHORT_CUDA_PEERS, "kvikio-raw")),
        Case("many", "tmpfs", "many", 1, "memory", SHORT_CUDA_PEERS),
        Case("odd", "tmpfs", "odd", 1, "memory", SHORT_CUDA_PEERS),
        Case("one", "tmpfs", "one", 1, "memory", SHORT_CUDA_PEERS),
        # Both read past the page cache by default; their other way is shown beside it.
        Case(
            "warm",
            "disk",
            "shards",
            4,
            "warm",
            (*CUDA_PEERS, "instanttensor:backend=BUFFERED", "fastsafetensors:direct=0"),
        ),
        Case("cold", "disk", "shards", 2, "cold", CUDA_PEERS),
    )
}


def file_set(name: str) -> str:
    """Return which files a case reads: `first` reads those of `tmpfs`."""
    return "tmpfs" if name == "first" else name


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated: " + ", ".join(CASES))
    parser.add_argument(
        "--peers", help="comma-separated loaders for all cases; a loader's options follow it: name:key=value"
    )
    parser.add_argument("--repeats", type=int, default=5, help="timed loads after the first")
    parser.add_argument("--first-repeats", type=int, default=3, help="fresh processes of the case `first`")
    parser.add_argument("--scale", type=float, default=1.0, help="shrinks all sizes")
    parser.add_argument("--tmpfs-gib", type=float, default=8.0)
    parser.add_argument("--disk-gib", type=float, default=6.0)
    parser.add_argument("--cold-gib", type=float, default=3.0)
    parser.add_argument("--tmpfs-dir", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--disk-dir", type=Path, default=Path("/var/tmp"))
    parser.add_argument("--rc-site", help="folder with safetensors 0.9 for the loader safetensors-prefetch")
    parser.add_argument(
        "--budget-s", type=float, default=540.0, help="seconds for the whole run; what no longer fits is named"
    )
    parser.add_argument("--peer-s", type=float, default=12.0, help="seconds of loading for one loader in one case")
    parser.add_argument("--json", type=Path, help="where to write everything; rewritten after each loader")
    args = parser.parse_args(argv)
    args.cases = [name for name in args.cases.split(",") if name]
    for name in args.cases:
        if name not in CASES:
            parser.error(f"no case {name!r}; there are {', '.join(CASES)}")
    if args.peers is not None:
        args.peers = [name for name in args.peers.split(",") if name]
        for name in args.peers:
            try:
                parse_peer(name)
            except ValueError as error:
                parser.error(str(error))
    if args.scale <= 0 or args.repeats < 0 or args.first_repeats < 1:
        parser.error("--scale must be above 0, --repeats at least 0, --first-repeats at least 1")
    return args


class Run:
    """One run: its budget, its folders, and what it has found so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.begin = time.monotonic()
        self.result: dict[str, Any] = {
            "schema": 1,
            "device": args.device,
            "command": sys.argv,
            "scale": args.scale,
            "machine": machine.describe(),
            "limits": {},
            "cases": {},
        }

    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return float(self.args.budget_s) - (time.monotonic() - self.begin)

    def say(self, text: str) -> None:
        """Print progress."""
        print(f"[{time.monotonic() - self.begin:6.1f} s] {text}", file=sys.stderr, flush=True)

    def save(self) -> None:
        """Write the JSON file, whole or not at all."""
        self.result["wall_s"] = time.monotonic() - self.begin
        self.result["goals"] = tables.goals(self.result)
        if self.args.json is None:
            return
        self.args.json.parent.mkdir(parents=True, exist_ok=True)
        part = self.args.json.with_suffix(".part")
        part.write_text(json.dumps(self.result, indent=1, default=str))
        part.replace(self.args.json)

    # Limits

    def measure_copies(self) -> None:
        """Measure pinned copies to the GPU; called at the start and at the end, the median of both counts."""
        if self.args.device != "cuda":
            return
        largest = max(16 * MIB, int(GIB * min(1.0, self.args.scale * 8)))
        sizes = [size for size in (largest, 16 * MIB, 4 * MIB, 1 * MIB) if size <= largest]
        status, rows, log = worker.run_isolated(
            limits.pinned_copies, {"sizes": sorted(set(sizes), reverse=True), "repeats": 10}, timeout_s=60
        )
        found = self.result["limits"].setdefault("pinned_copy", [])
        found.append(rows if status == "ok" else {"error": rows, "log": log})
        self.say(
            f"pinned copies: {rows[0]['bytes_per_s'] / 1e9:.2f} GB/s" if status == "ok" else f"pinned copies: {rows}"
        )

    def copy_limit(self) -> float | None:
        """Bytes/s of the largest pinned copy: the mean of all measurements of this run."""
        rates = [
            rows[0]["bytes_per_s"] for rows in self.result["limits"].get("pinned_copy", []) if isinstance(rows, list)
        ]
        return sum(rates) / len(rates) if rates else None

    def limit(self, case: Case) -> dict[str, Any] | None:
        """Return the limit that a case is measured against."""
        found = self.result["limits"]
        if case.cache == "cold":
            best = limits.best_read(found.get("cold_reads", []))
            if best is None:
                return None
            what = f"raw cold read, {best['mode']}, {best['chunk_nbytes'] // MIB} MiB x {best['width']}"
            return {"what": what, "bytes_per_s": best["bytes_per_s"]}
        if self.args.device == "cuda":
            rate = self.copy_limit()
            return None if rate is None else {"what": "pinned copy to the GPU", "bytes_per_s": rate}
        best = limits.best_read(found.get(f"warm_reads_{case.place}", []))
        if best is None:
            return None
        return {"what": "raw read of the page cache into small buffers", "bytes_per_s": best["bytes_per_s"]}

    def refresh(self) -> None:
        """Compute limits and ratios of all cases anew from all that is measured."""
        for name, case in self.result["cases"].items():
            case["limit"] = self.limit(CASES[name])
            tables.add_ratios(case)

    # Cases

    def nbytes(self, case: Case) -> int:
        """Bytes of tensor data of a case."""
        gib = (
            self.args.tmpfs_gib
            if case.place == "tmpfs"
            else self.args.cold_gib
            if case.cache == "cold"
            else self.args.disk_gib
        )
        return max(1 << 16, int(gib * GIB * self.args.scale))

    def peers(self, case: Case) -> list[str]:
        """Names of the loaders of a case."""
        return list(self.args.peers or (case.cuda_peers if self.args.device == "cuda" else CPU_PEERS))

    def run_case(self, case: Case, folder: Path, probe: Path | str) -> None:
        """Make the files of a case, run its loaders, keep what came."""
        paths = sorted(folder.glob("model-*.safetensors"))
        if not paths:
            need = self.nbytes(case) * 1.05
            folder.mkdir(parents=True, exist_ok=True)
            free = machine.file_system(folder)["free_nbytes"]
            if free < need:
                self.fail_case(case, f"{folder.parent} has {free / GIB:.1f} GiB free, {need / GIB:.1f} GiB are needed")
                return
            begin = time.monotonic()
            paths = data.make_checkpoint(
                folder, case.layout, nbytes=self.nbytes(case), shards=case.shards, scale=self.args.scale,
                sync=case.place == "disk",
            )  # fmt: skip
            made = sum(path.stat().st_size for path in paths)
            self.say(f"{case.name}: made {made / GIB:.2f} GiB in {time.monotonic() - begin:.1f} s")
        if case.cache != "memory":
            try:
                residency.resident_share(paths[0])
            except OSError as error:
                kind = machine.file_system(folder)["type"]
                self.fail_case(case, f"{kind} cannot say what is cached (RWF_NOWAIT: {error}); give another --disk-dir")
                return
        if isinstance(probe, Path):
            self.measure_reads(case, paths, probe)
        entry: dict[str, Any] = {
            "device": self.args.device,
            "nbytes": sum(path.stat().st_size for path in paths),
            "files": len(paths),
            "tensors": sum(len(data.read_entries(path)[0]) for path in paths),
            "cache": case.cache,
            "file_system": machine.file_system(folder),
            "peers": {},
        }
        self.result["cases"][case.name] = entry
        for peer in self.peers(case):
            outcome = self.run_peer(case, peer, paths)
            (tables.summarize_first if case.name == "first" else tables.summarize)(outcome)
            entry["peers"][peer] = outcome
            rate = outcome.get("median_bytes_per_s")
            self.say(
                f"{case.name}: {peer}: "
                + (f"{rate / 1e9:.2f} GB/s" if rate else f"{outcome['status']}: {outcome['reason']}")
            )
            self.refresh()
            self.save()
        if isinstance(probe, Path) and case.cache == "cold" and self.left_s() > 30:
            # Again after the loaders: a disk's rate drifts, and limit and loads must see the same disk.
            ways = limits.best_ways(self.result["limits"]["cold_reads"])
            if ways:
                self.result["limits"]["cold_reads"] += limits.cold_reads(probe, paths, again=1, ways=ways)
                self.refresh()

    def measure_reads(self, case: Case, paths: list[Path], probe: Path) -> None:
        """Measure raw reads of the files of a case, once a place and cache state."""
        found = self.result["limits"]
        key = "cold_reads" if case.cache == "cold" else f"warm_reads_{case.place}"
        if key not in found:
            if case.cache == "warm":
                residency.make_warm(paths)
            found[key] = limits.cold_reads(probe, paths) if case.cache == "cold" else limits.warm_reads(probe, paths)
            best = limits.best_read(found[key])
            self.say(f"{key}: " + (f"{best['bytes_per_s'] / 1e9:.2f} GB/s {best['mode']}" if best else "no way worked"))

    def fail_case(self, case: Case, reason: str) -> None:
        """Record a case that can't run; nothing is dropped silently."""
        self.say(f"{case.name}: {reason}")
        self.result["cases"][case.name] = {
            "device": self.args.device, "nbytes": 0, "cache": case.cache,
            "peers": {peer: {"status": "not run", "reason": reason} for peer in self.peers(case)},
        }  # fmt: skip
        self.save()

    def run_peer(self, case: Case, peer: str, paths: list[Path]) -> dict[str, Any]:
        """Run one loader, in one fresh process (or several, for first loads)."""
        args = self.args
        spec = {
            "peer": peer, "device": args.device, "paths": [str(path) for path in paths], "cache": case.cache,
            "repeats": args.repeats, "allowance_s": args.peer_s, "rc_site": args.rc_site, "sync": case.place == "disk",
        }  # fmt: skip
        if peer.split(":")[0] == "flashpack":
            free = machine.file_system(paths[0].parent)["free_nbytes"]
            need = sum(path.stat().st_size for path in paths) * 1.05
            packed = (paths[0].parent / "packed.flashpack").exists()
            if free < need and not packed:
                return {
                    "status": "not run",
                    "reason": f"its packed file needs {need / GIB:.1f} GiB, {free / GIB:.1f} GiB are free",
                }
            status, answer, log = self.isolated(worker.prepare_peer, spec, 120.0)
            if status != "ok":
                return {"status": "failed", "reason": f"conversion: {answer}", "log": log}
            if answer["reason"] is not None:
                return {"status": "unavailable", "reason": answer["reason"]}
        outcomes = []
        for _ in range(args.first_repeats if case.name == "first" else 1):
            if case.name == "first":
                spec["repeats"] = 0
            status, outcome, log = self.isolated(worker.run_peer, spec, args.peer_s * 2 + 60)
            if status != "ok":
                outcome = {"status": "failed", "reason": outcome, "log": log}
            outcomes.append(outcome)
        return tables.merge_first(outcomes) if case.name == "first" else outcomes[0]

    def isolated(self, task: Callable[..., Any], spec: dict[str, Any], timeout_s: float) -> tuple[str, Any, str]:
        """Run in a fresh process, within the budget."""
        timeout_s = min(timeout_s, self.left_s())
        if timeout_s < 3:
            return "failed", "the time budget of the run is spent", ""
        return worker.run_isolated(task, spec, timeout_s=timeout_s)

    def run(self) -> None:
        """Run all cases."""
        args = self.args
        folders = {
            place: folder / f"xds-bench-{os.getpid()}"
            for place, folder in (("tmpfs", args.tmpfs_dir), ("disk", args.disk_dir))
        }
        with limits.scratch() as scratch:
            probe = limits.build_probe(Path(scratch))
            if isinstance(probe, str):
                self.result["limits"]["error"] = probe
                self.say(probe)
            else:
                nbytes = max(MIB, int(256 * MIB * min(1.0, args.scale * 4)))
                self.result["limits"]["memcpy"] = limits.memory_copies(probe, nbytes)
            self.measure_copies()
            try:
                for index, name in enumerate(args.cases):
                    case = CASES[name]
                    if self.left_s() < 10:
                        self.fail_case(case, "the time budget of the run is spent")
                        continue
                    folder = folders[case.place] / file_set(name)
                    self.run_case(case, folder, probe)
                    if file_set(name) not in map(file_set, args.cases[index + 1 :]):
                        shutil.rmtree(folder, ignore_errors=True)
                self.measure_copies()
                self.refresh()
            finally:
                for folder in folders.values():
                    shutil.rmtree(folder, ignore_errors=True)
                self.save()


def main() -> int:
    """Run; exit 0 if every loader that is ours gave right bytes, else 1."""
    run = Run(arguments())
    run.run()
    print(tables.render(run.result))
    wrong = [
        f"{case}: {peer}"
        for case, entry in run.result["cases"].items()
        for peer, outcome in entry["peers"].items()
        if outcome["status"] == "wrong bytes"
    ]
    if wrong:
        print("wrong bytes: " + ", ".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
