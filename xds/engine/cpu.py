"""How many CPUs this process may use: affinity and the cgroup's quota. Layer: engine; imports nothing of ours."""

from __future__ import annotations

import os
from pathlib import Path


def _read(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _own_cgroups(root: Path) -> list[Path]:
    """Return the folders whose quota binds this process: its own cgroup and all above it, v2 then v1."""
    folders = []
    for line in (root / "proc/self/cgroup").read_text().splitlines() if (root / "proc/self/cgroup").exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / (controllers if controllers else "")
        folder = base / path.lstrip("/")
        # In a container the path may be the host's: then the mount point itself is ours.
        folders += [folder, *[parent for parent in folder.parents if parent == base or base in parent.parents]]
    return [*folders, root / "sys/fs/cgroup", root / "sys/fs/cgroup/cpu"]


def quota(root: Path = Path("/")) -> float | None:
    """Return the tightest CPU quota in CPUs, or ``None`` where there is none (cgroup v2 ``cpu.max``, v1 ``cfs``)."""
    found = []
    for folder in _own_cgroups(root):
        limit = _read(folder / "cpu.max")
        if not limit:
            limit = _read(folder / "cpu.cfs_quota_us") + _read(folder / "cpu.cfs_period_us")
        if len(limit) == 2 and limit[0] not in ("max", "-1"):
            found.append(int(limit[0]) / int(limit[1]))
    return min(found, default=None)


def usable_cpus(root: Path = Path("/")) -> int:
    """Return the CPUs this process may keep busy, at least 1."""
    cpus = len(os.sched_getaffinity(0))
    limit = quota(root)
    return max(1, min(cpus, int(limit + 0.5)) if limit is not None else cpus)
