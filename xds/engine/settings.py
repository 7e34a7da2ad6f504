"""The mover's sizes: threads, ring slots, chunk; from the CPU quota, or set by environment variables.

Layer: engine; imports nothing of ours but ``cpu`` and errors.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from xds.engine.cpu import usable_cpus

#: How a chunk was read; the order is that of ``enum xds_method`` in ``xds/native/src/abi.h``.
METHODS = ("pread", "mapped", "buffered", "direct", "uring", "cufile")

#: The ring of a process never grows beyond this.
RING_LIMIT_NBYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of the mover.

    Attributes:
        threads: threads at most; requests to slow storage run on all of them.
        cpu_threads: threads at most that copy out of the page cache at once.
        slots: ring slots a thread.
        chunk_nbytes: bytes of a slot, a multiple of 4096.
        streams: copy streams a device, shared by the threads.
        forbid: methods (of :data:`METHODS`) that are never used.
    """

    threads: int
    cpu_threads: int
    slots: int
    chunk_nbytes: int
    streams: int = 1
    forbid: frozenset[str] = frozenset()

    @property
    def ring_nbytes(self) -> int:
        """Bytes of the whole ring."""
        return self.threads * self.slots * self.chunk_nbytes


def _number(name: str, default: int, low: int, high: int) -> int:
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise ValueError(f"{name}={text!r}: expected a whole number from {low} to {high}")
    return value


def settings() -> Settings:
    """Return the sizes for this process.

    Environment: ``XDS_MOVER_THREADS``, ``XDS_MOVER_CPU_THREADS``, ``XDS_MOVER_SLOTS``, ``XDS_MOVER_CHUNK_NBYTES``,
    ``XDS_MOVER_FORBID`` (comma-separated methods).

    Raises:
        ValueError: a variable is not what it must be, or the ring would be larger than 64 MiB.
    """
    cpus = usable_cpus()
    # Copying out of the page cache wants a CPU a thread. Ten threads with two slots of 3 MiB each feed a PCIe Gen5 copy
    # engine, one stream carries more than several, and disks prefer few large requests (docs/performance.md).
    threads = _number("XDS_MOVER_THREADS", 10, 1, 64)
    cpu_threads = _number("XDS_MOVER_CPU_THREADS", min(threads, cpus), 1, 64)
    slots = _number("XDS_MOVER_SLOTS", 2, 1, 64)
    default_chunk = min(3 << 20, RING_LIMIT_NBYTES // (threads * slots) // 4096 * 4096)
    chunk_nbytes = _number("XDS_MOVER_CHUNK_NBYTES", default_chunk, 4096, RING_LIMIT_NBYTES)
    streams = _number("XDS_MOVER_STREAMS", 1, 1, 64)
    forbid = frozenset(filter(None, os.environ.get("XDS_MOVER_FORBID", "").split(",")))
    if forbid - set(METHODS):
        raise ValueError(f"XDS_MOVER_FORBID: {sorted(forbid - set(METHODS))} are not among {list(METHODS)}")
    if chunk_nbytes % 4096:
        raise ValueError(f"XDS_MOVER_CHUNK_NBYTES={chunk_nbytes}: expected a multiple of 4096")
    made = Settings(threads, min(cpu_threads, threads), slots, chunk_nbytes, streams, forbid)
    if made.ring_nbytes > RING_LIMIT_NBYTES:
        raise ValueError(
            f"the ring would be {made.threads} threads x {made.slots} slots x {made.chunk_nbytes} bytes = "
            f"{made.ring_nbytes} bytes; at most {RING_LIMIT_NBYTES} are allowed"
        )
    return made
