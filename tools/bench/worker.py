"""Runs one loader on one file set in a process of its own. Layer: tools.

Processes are forked from a server that has imported torch and NumPy but never touched the GPU (``forkserver``): each is
fresh - no CUDA context, no pinned pool, no loader - and costs no second import.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench import residency
from bench.loaders import LOADERS, parse_peer

_CONTEXT: Any = None


def context() -> Any:
    """Return the forkserver context; torch is imported there once, without a look at the GPU."""
    global _CONTEXT
    if _CONTEXT is None:
        _CONTEXT = multiprocessing.get_context("forkserver")
        _CONTEXT.set_forkserver_preload(["numpy", "torch"])
    return _CONTEXT


def _child(
    sender: Connection, log: str, environment: Mapping[str, str], task: Callable[..., Any], arguments: Any
) -> None:
    # The loaders' own output belongs to their log, not between ours.
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.environ.update(environment)
    try:
        sender.send(("ok", task(arguments)))
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        sender.send(("failed", f"{type(error).__name__}: {error}"))
    finally:
        sender.close()


def run_isolated(
    task: Callable[..., Any], arguments: Any, *, timeout_s: float, environment: Mapping[str, str] | None = None
) -> tuple[str, Any, str]:
    """Run ``task(arguments)`` in a fresh process.

    Returns:
        ``("ok", result, log)`` or ``("failed", reason, log)``; crash, kill and timeout are failures with a reason.
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)
    fd, log = tempfile.mkstemp(prefix="bench-")
    os.close(fd)
    process = context().Process(target=_child, args=(sender, log, dict(environment or {}), task, arguments))
    process.start()
    sender.close()
    status, result = "failed", f"no answer within {timeout_s:.0f} s"
    try:
        if receiver.poll(timeout_s):
            try:
                status, result = receiver.recv()
            except EOFError:
                process.join(10)
                status, result = "failed", f"the process ended with code {process.exitcode} and no answer"
        # Exit handlers of foreign pools can take long or hang; the answer is already here.
        process.join(10 if status == "ok" else 1)
    finally:
        if process.is_alive():
            process.kill()
            process.join()
        receiver.close()
        text = Path(log).read_text(errors="replace")
        Path(log).unlink()
    return status, result, text[-3000:]


def _status_nbytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return 0


def _reset_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _synchronize(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def _start_device(device: str, peer: str) -> None:
    """Make the CUDA context (of torch and, where it is used, CuPy) before anything is timed."""
    if device != "cuda":
        return
    import torch

    torch.cuda.init()
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    if peer in ("xds-cupy", "kvikio-raw"):
        import cupy

        cupy.zeros(1)
        cupy.cuda.Device().synchronize()


def prepare_peer(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Do a loader's conversion of the files; not timed."""
    name, options = parse_peer(spec["peer"])
    loader = LOADERS[name](spec["device"], options, spec.get("rc_site"))
    paths = [Path(path) for path in spec["paths"]]
    reason = loader.available()
    if reason is None:
        loader.prepare(paths)
        if spec.get("sync"):
            for path in loader.files(paths):
                fd = os.open(path, os.O_RDONLY)
                os.fsync(fd)
                os.close(fd)
    return {"reason": reason}


def run_peer(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Load ``spec["repeats"] + 1`` times and check the last result.

    The first load is the first of its process and stands apart (``first_s``). ``spec``: peer, device, paths, cache
    (``warm``, ``cold``, ``memory``), repeats, allowance_s (time for all loads; at least one is made), rc_site.
    """
    name, options = parse_peer(spec["peer"])
    device: str = spec["device"]
    paths = [Path(path) for path in spec["paths"]]
    loader = LOADERS[name](device, options, spec.get("rc_site"))
    begin = time.perf_counter()
    reason = loader.available()
    if reason is not None:
        return {"status": "unavailable", "reason": reason}
    _start_device(device, name)
    setup_s = time.perf_counter() - begin

    files = loader.files(paths)
    nbytes = sum(path.stat().st_size for path in files)
    loads: list[dict[str, Any]] = []
    result: Any = None
    spent = 0.0
    for _ in range(spec["repeats"] + 1):
        result = None
        gc.collect()
        _synchronize(device)
        before = None
        if spec["cache"] == "cold":
            before = residency.make_cold(files)
        elif spec["cache"] == "warm":
            before = residency.make_warm(files)
        _reset_peak()
        rss = _status_nbytes("VmRSS")
        cpu = resource.getrusage(resource.RUSAGE_SELF)
        start = time.perf_counter()
        result = loader.load(paths)
        _synchronize(device)
        seconds = time.perf_counter() - start
        used = resource.getrusage(resource.RUSAGE_SELF)
        loads.append(
            {
                "seconds": seconds,
                "cpu_s": used.ru_utime + used.ru_stime - cpu.ru_utime - cpu.ru_stime,
                "host_peak_growth_nbytes": max(0, _status_nbytes("VmHWM") - rss),
                "resident_before": before,
                "report": loader.report(result),
            }
        )
        spent += seconds
        if spent + seconds > spec["allowance_s"] and len(loads) >= min(2, spec["repeats"] + 1):
            break
    resident_after = None if spec["cache"] == "memory" else min(residency.resident_share(path) for path in files)
    if device == "cpu":
        import torch

        # The compare is bound by memory; a second thread only spins where others use the CPUs.
        torch.set_num_threads(1)
    check = loader.check(result, paths)
    reports = [load["report"] for load in loads if load["report"] is not None]
    return {
        "status": "ok" if check.problem is None else "wrong bytes",
        "reason": check.problem,
        "version": loader.version(),
        "setup_s": setup_s,
        "nbytes": nbytes,
        "loads": loads,
        "resident_after": resident_after,
        "check": asdict(check),
        "pinned_peak_nbytes": max((report.get("pinned_nbytes", 0) for report in reports), default=None),
    }
