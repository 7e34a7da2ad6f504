"""What a read did, as a value, and the totals of the process. Layer: bottom; imports nothing of ours."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ReadReport:
    """How the bytes of one read or write travelled.

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


class Reports(list[Any]):
    """Reports in the order in which their reads and writes ended.

    Attributes:
        errors: reads and writes that failed; they have no report.
        owner: the thread that asked for them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.errors = 0
        self.owner = threading.get_ident()

    @property
    def nbytes(self) -> int:
        """Bytes of all reports together."""
        return sum(report.nbytes for report in list(self))


class Totals:
    """Process-wide sums of all reports, and who collects them; one lock, no I/O under it."""

    def __init__(self) -> None:
        # Reentrant: a finalizer or a signal handler that counts may run inside.
        self._lock = threading.RLock()
        self._collecting: tuple[Reports, ...] = ()
        self._clear()

    def after_fork(self) -> None:
        """Take a new lock: the old one may be held by a thread that the child does not have.

        Nobody is left to read what those threads collect.
        """
        self._lock = threading.RLock()
        here = threading.get_ident()
        self._collecting = tuple(reports for reports in self._collecting if reports.owner == here)

    def collect(self, reports: Reports) -> None:
        """Add all that ends from now on to ``reports`` too."""
        with self._lock:
            self._collecting = (*self._collecting, reports)

    def release(self, reports: Reports) -> None:
        """End what :meth:`collect` began."""
        with self._lock:
            self._collecting = tuple(other for other in self._collecting if other is not reports)

    def _clear(self) -> None:
        self._reads = 0
        self._errors = 0
        self._nbytes = 0
        self._writes = 0
        self._written_nbytes = 0
        self._by: dict[str, dict[str, int]] = {"posting": {}, "placement": {}, "method": {}}

    def add(self, report: ReadReport) -> None:
        """Count one finished read or write."""
        with self._lock:
            if report.operation == "write":
                self._writes += 1
                self._written_nbytes += report.nbytes
            else:
                self._reads += 1
                self._nbytes += report.nbytes
                for key, sums in self._by.items():
                    for name, nbytes in getattr(report, key).items():
                        sums[name] = sums.get(name, 0) + nbytes
            for reports in self._collecting:
                reports.append(report)

    def add_error(self) -> None:
        """Count one failed read or write."""
        with self._lock:
            self._errors += 1
            for reports in self._collecting:
                reports.errors += 1

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
                "writes": self._writes,
                "written_nbytes": self._written_nbytes,
                **{key: dict(sums) for key, sums in self._by.items()},
            }


#: The process's sums; ``xds.stats()`` shows them.
TOTALS = Totals()
os.register_at_fork(after_in_child=TOTALS.after_fork)
