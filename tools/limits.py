#!/usr/bin/env python3
"""What this machine can do at best: pinned copies, memcpy, raw reads warm and cold; Markdown, JSON on request."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench import data, limits, machine, residency, worker

GIB = 1 << 30
MIB = 1 << 20


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure all that can be measured; what can't says why."""

    def say(what: str) -> None:
        print(f"limits: {what}", file=sys.stderr, flush=True)

    found: dict[str, Any] = {"machine": machine.describe(), "file_system": machine.file_system(folder)}
    if args.device == "cuda":
        say("pinned copies")
        sizes = [size for size in (GIB, 16 * MIB, 4 * MIB, MIB, 64 << 10, 4 << 10) if size <= args.gib * GIB]
        status, rows, log = worker.run_isolated(limits.pinned_copies, {"sizes": sizes, "repeats": 10}, timeout_s=120)
        found["pinned_copy"] = rows if status == "ok" else {"error": rows, "log": log}
    with limits.scratch() as scratch:
        probe = limits.build_probe(Path(scratch))
        if isinstance(probe, str):
            return {**found, "error": probe}
        say("memcpy")
        found["memcpy"] = limits.memory_copies(probe, min(256 * MIB, int(args.gib * GIB)))
        disk = found["file_system"]["type"] not in ("tmpfs", "ramfs")
        say(f"writing {args.gib:g} GiB to {folder}")
        paths = data.make_checkpoint(folder, "shards", nbytes=int(args.gib * GIB), shards=2, scale=args.gib, sync=disk)
        if disk:
            say("cold reads")
            found["cold_reads"] = limits.cold_reads(probe, paths)
            residency.make_warm(paths)
        say("warm reads")
        found["warm_reads"] = limits.warm_reads(probe, paths)
    return found


def table(found: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    lines = ["| what | GB/s |", "|---|---|"]
    copies = found.get("pinned_copy", [])
    if isinstance(copies, dict):
        lines.append(f"| pinned copy | {copies['error']} |")
        copies = []
    rows = [(f"pinned copy, {row['nbytes'] / MIB:g} MiB", row) for row in copies]
    rows += [(f"memcpy, {row['threads']} threads", row) for row in found.get("memcpy", [])]
    for key in ("warm_reads", "cold_reads"):
        for row in found.get(key, []):
            advice = ", WILLNEED" if row["willneed"] else ""
            rows.append((f"{key[:4]} {row['mode']}, {row['chunk_nbytes'] / MIB:g} MiB x {row['width']}{advice}", row))
    lines += [f"| {name} | {row['bytes_per_s'] / 1e9:.2f} |" if "bytes_per_s" in row else f"| {name} | {row['error']} |"
              for name, row in rows]  # fmt: skip
    return "\n".join(lines)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"), help="file system to read from")
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    # The files are removed on the way out, also where a scheduler ends the run.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    folder = args.dir / f"xds-limits-{os.getpid()}"
    folder.mkdir(parents=True)
    try:
        found = measure(args, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))
    print(table(found))
    if "error" in found:
        print(found["error"], file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
