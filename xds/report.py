"""What a read did, as a value, and the totals of the process. Layer: bottom; imports nothing of ours."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ReadReport:
    """How the bytes of one read travelled.

    Attributes:
        nbytes: bytes delivered.
        posting: bytes by who posted the requests: ``gpu`` or ``host``.
        placement: bytes by how they got into the array: ``mapped`` (host arrays), ``copy`` (copy engine through the
            pinned ring), ``dma`` (cuFile with real DMA).
        method: bytes by how the file was read: ``pread``, ``mapped``, ``direct``, ``uring``, ``buffered``, ``cufile``.
        resident: share of the sampled pages found in the page cache, 0 to 1; ``None`` where nothing was sampled.
        engine: name of what moved them.
        operation: ``read`` (files to arrays) or ``write`` (arrays to files).
        device: CUDA device ordinal, or ``None`` for host arrays.
        commands: read requests issued to the kernel.
        retries: requests issued again (short reads, interrupted calls).
        threads: threads that moved bytes.
        pinned_nbytes: pinned memory of the process when the read ended.
        seconds: ``total``, always there, is the wall time. The mover adds ``read_threads``, ``copy_threads`` and
            ``setup_threads`` (reading, waiting for the copy engine, making slots of the ring), each summed over all
            threads and all requests in flight. Requests of io_uring overlap within one thread, so a sum can exceed
            ``threads`` times ``total``: it compares stages and is no wall time.
        notes: why something was not done another way, one sentence each.
    """

    nbytes: int = 0
    posting: Mapping[str, int] = field(default_factory=dict)
    placement: Mapping[str, int] = field(default_factory=dict)
    method: Mapping[str, int] = field(default_factory=dict)
    resident: float | None = None
    engine: str = "mover"
    operation: str = "read"
    device: int | None = None
    commands: int = 0
    retries: int = 0
    threads: int = 0
    pinned_nbytes: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON-able values."""
        return asdict(self)


class Totals:
    """Process-wide sums of all reports; one lock, no I/O under it."""

    def __init__(self) -> None:
        # Reentrant: a finalizer or a signal handler that counts may run inside.
        self._lock = threading.RLock()
        self._clear()

    def after_fork(self) -> None:
        """Take a new lock: the old one may be held by a thread that the child does not have."""
        self._lock = threading.RLock()

    def _clear(self) -> None:
        self._reads = 0
        self._errors = 0
        self._nbytes = 0
        self._by: dict[str, dict[str, int]] = {"posting": {}, "placement": {}, "method": {}}

    def add(self, report: ReadReport) -> None:
        """Count one finished read."""
        with self._lock:
            self._reads += 1
            self._nbytes += report.nbytes
            for key, sums in self._by.items():
                for name, nbytes in getattr(report, key).items():
                    sums[name] = sums.get(name, 0) + nbytes

    def add_error(self) -> None:
        """Count one failed read."""
        with self._lock:
            self._errors += 1

    def reset(self) -> None:
        """Set all to zero."""
        with self._lock:
            self._clear()

    def snapshot(self) -> dict[str, Any]:
        """Return the sums as plain values."""
        with self._lock:
            return {
                "reads": self._reads,
                "errors": self._errors,
                "nbytes": self._nbytes,
                **{key: dict(sums) for key, sums in self._by.items()},
            }


#: The process's sums; ``xds.stats()`` shows them.
TOTALS = Totals()
os.register_at_fork(after_in_child=TOTALS.after_fork)
