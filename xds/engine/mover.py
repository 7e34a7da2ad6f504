"""Thin host-only mover. Layer: engine."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Sequence

from xds.errors import ShortReadError
from xds.plan import Segments
from xds.report import TOTALS, ReadReport


class MoverTransfer:
    """See :class:`xds.backend.Transfer`."""

    def __init__(
        self, fds: Sequence[int], paths: Sequence[str], *, device: int | None = None, timeout_s: float = 60.0
    ) -> None:
        assert device is None
        self._fds, self._paths, self._batches, self._given = fds, paths, 0, 0
        self._nbytes = 0
        self._begin = time.perf_counter()

    def add(self, segments: Segments, *, stream: int | None = None, keepalive: object = None) -> int:
        for offset, nbytes, address, file, _ in segments.tolist():
            view = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B") if nbytes else memoryview(b"")
            got = 0
            while got < nbytes:
                n = os.preadv(self._fds[file], [view[got:]], offset + got)
                if n == 0:
                    raise ShortReadError(f"{self._paths[file]}: ended at {offset + got}")
                got += n
            self._nbytes += nbytes
        self._batches += 1
        return self._batches - 1

    def seal(self) -> None:
        pass

    def next_ready(self) -> int | None:
        if self._given == self._batches:
            return None
        self._given += 1
        return self._given - 1

    def wait(self) -> ReadReport:
        n = self._nbytes
        report = ReadReport(n, {"host": n}, {"mapped": n}, {"pread": n}, seconds={"total": time.perf_counter() - self._begin})
        TOTALS.add(report)
        return report

    def done(self) -> bool:
        return True

    def cancel(self) -> None:
        pass

    def __enter__(self) -> MoverTransfer:
        return self

    def __exit__(self, *exc: object) -> None:
        pass
