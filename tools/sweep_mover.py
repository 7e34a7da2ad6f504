#!/usr/bin/env python3
"""How fast ``xds.load`` is with other sizes of the mover: threads, slots, chunk, methods; sorted by GB/s.

Every combination runs in a fresh process with ``XDS_MOVER_THREADS``, ``XDS_MOVER_SLOTS``, ``XDS_MOVER_CHUNK_NBYTES``,
``XDS_MOVER_CPU_THREADS`` and ``XDS_MOVER_FORBID`` set. Files are made as for ``bench_load.py``, or ``--files``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench import data, limits, machine, tables, worker

GIB = 1 << 30
KIB = 1 << 10
RING_LIMIT_NBYTES = 64 << 20


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"), help="where the files are made")
    parser.add_argument("--files", type=Path, nargs="+", help="files of an earlier run, in one folder, instead")
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--layout", choices=("shards", "many", "odd", "one"), default="shards")
    parser.add_argument("--cache", choices=("memory", "warm", "cold"), default="memory", help="memory: tmpfs")
    parser.add_argument("--threads", type=_numbers, default=[8, 12, 16])
    parser.add_argument("--cpu-threads", type=_numbers, default=[0], help="0: the default")
    parser.add_argument("--slots", type=_numbers, default=[2, 3, 4])
    parser.add_argument("--chunk-kib", type=_numbers, default=[512, 1024, 2048, 4096])
    parser.add_argument("--forbid", nargs="+", default=[""], help="methods never used, one list a combination: mapped")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--budget-s", type=float, default=300.0)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


def combinations(args: argparse.Namespace) -> list[dict[str, str]]:
    """Return the environments to try: those whose ring fits, the machine's defaults first."""
    found: list[dict[str, str]] = [{"XDS_MOVER_FORBID": forbid} for forbid in args.forbid]
    grid = itertools.product(args.forbid, args.threads, args.cpu_threads, args.slots, args.chunk_kib)
    for forbid, threads, cpu_threads, slots, chunk_kib in grid:
        if threads * slots * chunk_kib * KIB > RING_LIMIT_NBYTES or cpu_threads > threads:
            continue
        environment = {
            "XDS_MOVER_FORBID": forbid,
            "XDS_MOVER_THREADS": str(threads),
            "XDS_MOVER_SLOTS": str(slots),
            "XDS_MOVER_CHUNK_NBYTES": str(chunk_kib * KIB),
        }
        if cpu_threads:
            environment["XDS_MOVER_CPU_THREADS"] = str(cpu_threads)
        found.append(environment)
    return found


def _row(environment: dict[str, str], outcome: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"environment": environment, "status": outcome["status"], "reason": outcome.get("reason")}
    if outcome["status"] == "ok":
        report = outcome["loads"][-1]["report"]
        row.update(
            {
                key: outcome[key]
                for key in ("median_bytes_per_s", "best_bytes_per_s", "first_bytes_per_s", "cpu_s_per_gib")
            },
            pinned_nbytes=outcome["pinned_peak_nbytes"],
            method=report["method"],
            seconds=report["seconds"],
        )
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as Markdown, fastest first."""
    lines = [
        "| threads | cpu | slots | chunk KiB | forbid | median | best | first | CPU s/GiB | pinned MiB | method |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: -row.get("median_bytes_per_s", 0)):
        environment = row["environment"]
        chunk = environment.get("XDS_MOVER_CHUNK_NBYTES")
        sizes = " | ".join(
            environment.get(f"XDS_MOVER_{name}", "default") for name in ("THREADS", "CPU_THREADS", "SLOTS")
        )
        head = f"| {sizes} | {int(chunk) // KIB if chunk else 'default'} | {environment['XDS_MOVER_FORBID'] or '-'} |"
        if row["status"] != "ok":
            lines.append(f"{head} {row['status']}: {' '.join(str(row['reason']).split())[:120]} | | | | | |")
            continue
        rates = " | ".join(f"{row[f'{key}_bytes_per_s'] / 1e9:.2f}" for key in ("median", "best", "first"))
        method = ", ".join(name for name, nbytes in row["method"].items() if nbytes)
        lines.append(f"{head} {rates} | {row['cpu_s_per_gib']:.3f} | {row['pinned_nbytes'] / 2**20:.0f} | {method} |")
    return "\n".join(lines)


def main() -> int:
    """Sweep; exit 1 if nothing could be measured."""
    args = arguments()
    begin = time.monotonic()
    folder = args.dir / f"xds-sweep-{os.getpid()}"
    result: dict[str, Any] = {"schema": 1, "command": sys.argv, "machine": machine.describe(), "rows": []}
    try:
        paths = args.files or data.make_checkpoint(
            folder,
            args.layout,
            nbytes=int(args.gib * GIB),
            shards=args.shards,
            scale=min(1.0, args.gib),
            sync=args.cache != "memory",
        )
        if args.device == "cuda":
            sizes = {"sizes": [GIB, 16 << 20, 4 << 20, 2 << 20, 1 << 20, 512 << 10], "repeats": 5}
            result["pinned_copy"] = worker.run_isolated(limits.pinned_copies, sizes, timeout_s=60)[:2]
        spec = {
            "peer": "xds",
            "device": args.device,
            "paths": [str(path) for path in paths],
            "cache": args.cache,
            "repeats": args.repeats,
            "allowance_s": 20.0,
        }
        todo = combinations(args)
        for done, environment in enumerate(todo):
            left = args.budget_s - (time.monotonic() - begin)
            if left < 5:
                print(f"the time budget is spent: {len(todo) - done} of {len(todo)} combinations were not run")
                break
            status, outcome, log = worker.run_isolated(
                worker.run_peer, spec, timeout_s=min(left, 60.0), environment=environment
            )
            if status != "ok":
                outcome = {"status": "failed", "reason": outcome, "log": log}
            tables.summarize(outcome)
            result["rows"].append(_row(environment, outcome))
            if args.json is not None:
                args.json.write_text(json.dumps(result, indent=1, default=str))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if "pinned_copy" in result:
        print(f"pinned copies: {result['pinned_copy']}")
    print(table(result["rows"]))
    return 0 if any(row["status"] == "ok" for row in result["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
