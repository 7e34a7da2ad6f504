"""Host memory for arrays: private anonymous pages, and whether enough is left. Layer: interop; imports no framework."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np

_HUGE_NBYTES = 2 << 20


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


def available_nbytes() -> int | None:
    """Return the bytes of host memory that can be used without swapping more than there is swap, or ``None``."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    found = {line.split(":")[0]: int(line.split()[1]) << 10 for line in text.splitlines() if line.endswith(" kB")}
    if "MemAvailable" not in found:
        return None
    return found["MemAvailable"] + found.get("SwapFree", 0)


def require_available(nbytes: int, what: str) -> None:
    """Raise MemoryError if ``nbytes`` are more than this machine has left, rather than be killed half-way."""
    available = available_nbytes()
    if available is not None and nbytes > available:
        raise MemoryError(f"{what} needs {nbytes} bytes of host memory, {available} are available")
