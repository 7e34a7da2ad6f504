"""Which machine a measurement was made on, as plain values. Layer: tools; stdlib alone."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

PACKAGES = (
    "xpu-direct-storage", "numpy", "torch", "cupy-cuda12x", "cupy-cuda13x", "fsspec", "safetensors", "instanttensor",
    "fastsafetensors", "flashpack", "runai-model-streamer", "kvikio-cu13", "libkvikio-cu13",
)  # fmt: skip


def _text(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str | None:
    for line in (_text("/proc/cpuinfo") or "").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return None


def _gpus() -> list[dict[str, str]]:
    keys = ("name", "driver_version", "memory.total", "pcie.link.gen.max", "pcie.link.width.max")
    command = ["nvidia-smi", f"--query-gpu={','.join(keys)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode:
        return []
    return [dict(zip(keys, line.split(", "), strict=False)) for line in done.stdout.splitlines()]


def file_system(folder: Path) -> dict[str, Any]:
    """Return type and free bytes of the file system that holds ``folder``."""
    best = ("", "unknown")
    resolved = str(folder.resolve())
    for line in (_text("/proc/mounts") or "").splitlines():
        _, point, kind, *_ = line.split()
        inside = resolved == point or resolved.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best[0]):
            best = (point, kind)
    stat = os.statvfs(folder)
    return {"type": best[1], "free_nbytes": stat.f_bavail * stat.f_frsize}


def describe() -> dict[str, Any]:
    """Return kernel, CPUs, memory, GPUs and package versions."""
    memory = {
        line.split(":")[0]: int(line.split()[1]) * 1024
        for line in (_text("/proc/meminfo") or "").splitlines()
        if line.startswith(("MemTotal", "MemAvailable"))
    }
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "cpu_model": _cpu_model(),
        "cpus": os.cpu_count(),
        "cpus_allowed": len(os.sched_getaffinity(0)),
        "cgroup_cpu_max": _text("/sys/fs/cgroup/cpu.max"),
        "memory_total_nbytes": memory.get("MemTotal"),
        "memory_available_nbytes": memory.get("MemAvailable"),
        "gpus": _gpus(),
        "packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
    }
