"""Host memory for arrays: private anonymous pages, and whether enough is left. Layer: interop; imports no framework."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from pathlib import Path

import numpy as np

_HUGE_NBYTES = 2 << 20

#: What counts as used in a cgroup and can be given back at once, in its ``memory.stat``: page cache and such.
_RECLAIMABLE_V2 = ("active_file", "inactive_file", "slab_reclaimable")
_RECLAIMABLE_V1 = ("total_active_file", "total_inactive_file")
#: v1 says "no limit" by a number like this or above.
_NO_LIMIT = 1 << 62


def allocate(nbytes: int) -> tuple[mmap.mmap, int]:
    """Return ``nbytes`` zeroed, writable, page-aligned bytes and their address; freed when nothing refers to them.

    Raises MemoryError that names the need.
    """
    try:
        # Private: after a fork the child's writes must not show in the parent, as the default MAP_SHARED would have it.
        memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"could not get {nbytes} bytes of host memory: {error.strerror}") from error
    if nbytes >= _HUGE_NBYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel built without huge pages: slower first touch, nothing else
            pass
    return memory, np.frombuffer(memory, dtype=np.uint8).ctypes.data


def available_nbytes(root: Path = Path("/")) -> int | None:
    """Return the bytes of host memory that can be had without being killed, or ``None`` if nothing says so.

    The machine's, with what can be swapped, and no more than the memory limits of this process's cgroups (v2 or v1)
    leave; ``root`` is where ``proc`` and ``sys`` are.
    """
    return min(_rooms(root, math.inf), default=(None, ""))[0]


def require_available(nbytes: int, what: str, root: Path = Path("/")) -> None:
    """Raise MemoryError if ``nbytes`` are more than this machine or its cgroup has left, rather than be killed."""
    available, where = min(_rooms(root, nbytes), default=(nbytes, ""))
    if nbytes > available:
        raise MemoryError(f"{what} needs {nbytes} bytes of host memory, {available} are available{where}")


def _rooms(root: Path, enough: float) -> Iterator[tuple[int, str]]:
    """Yield the bytes left by the machine and by each limit above this process; ``enough`` ends a closer look."""
    found = _table(root / "proc/meminfo")
    swap = found.get("SwapFree:", 0) << 10
    if "MemAvailable:" in found:
        yield (found["MemAvailable:"] << 10) + swap, ""
    for folder, v2 in _cgroups(root):
        room = _cgroup_room(folder, v2, swap, enough)
        if room is not None:
            limit = folder / ("memory.max" if v2 else "memory.limit_in_bytes")
            yield room, f" below the limit in {limit}"


def _cgroups(root: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of this process's memory cgroup and of those above it, and whether they are v2."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        parts = [part for part in path.split("/") if part]
        if ".." in parts:
            parts = []  # outside of the namespace's root: no folder of it is to be seen
        for mount in {"memory", controllers} if controllers else ("", "unified"):
            # In a container the path may be the host's: then the mount point itself is ours.
            for count in range(len(parts), -1, -1):
                yield (root / "sys/fs/cgroup" / mount).joinpath(*parts[:count]), not controllers


def _cgroup_room(folder: Path, v2: bool, swap: int, enough: float) -> int | None:
    limit = _number(folder / ("memory.max" if v2 else "memory.limit_in_bytes"))
    if limit is None or limit >= _NO_LIMIT:
        return None
    used = _number(folder / ("memory.current" if v2 else "memory.usage_in_bytes"))
    if used is None:
        return None
    room = max(0, limit - used)
    if room >= enough:
        return room  # memory.stat is slow to read on a large machine
    stat = _table(folder / "memory.stat")
    reclaimable = sum(stat.get(name, 0) for name in (_RECLAIMABLE_V2 if v2 else _RECLAIMABLE_V1))
    room = max(0, min(limit, limit - used + reclaimable))
    # v2 limits swap by itself, v1 memory and swap together.
    swap_limit = _number(folder / ("memory.swap.max" if v2 else "memory.memsw.limit_in_bytes"))
    swap_used = _number(folder / ("memory.swap.current" if v2 else "memory.memsw.usage_in_bytes"))
    if swap_limit is None or swap_used is None:
        return room + swap
    left = max(0, swap_limit - swap_used)
    return room + min(swap, left) if v2 else min(room + swap, left + reclaimable)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):  # ValueError: no text, or no name
        return ""


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdecimal() else None


def _table(path: Path) -> dict[str, int]:
    rows = (line.split() for line in _read(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}
