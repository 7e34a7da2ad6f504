"""Reads and writes on their way: what ``pread`` and ``pwrite`` return. Layer: file system."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from xds.backend import Transfer
from xds.errors import CancelledError, ForkedProcessError
from xds.observe import TRACE, Span


class TransferFuture:
    """Bytes on their way between a file and an array. Safe for many threads.

    It belongs to the process that began it: a forked child that inherits one sees a result that was there before the
    fork, and else gets a ForkedProcessError.

    Attributes:
        report: how the bytes travelled; ``None`` until :meth:`get` or :meth:`result` has returned.
    """

    def __init__(
        self,
        path: str,
        transfer: Transfer | None,
        nbytes: int,
        *,
        finish: Callable[[Transfer], Any] | None = None,
        report: Any = None,
        keepalive: object = None,
        operation: str = "read",
    ) -> None:
        self._pid = os.getpid()
        self._path, self._transfer, self._nbytes = path, transfer, nbytes
        self._finish, self._keepalive = finish, keepalive
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self.report = report
        self._span = Span(operation, path, nbytes=nbytes) if transfer is not None and TRACE.callbacks else None

    def done(self) -> bool:
        """Return whether it has ended, well or not; never blocks."""
        transfer = self._transfer
        if transfer is not None:
            self._check_process()
        return transfer is None or transfer.done()

    def get(self) -> int:
        """Wait, and return bytes moved: fewer than asked for only at the end of a file. Raises what failed."""
        # A forked child must not wait for the lock: whoever held it is not there.
        if self._pid != os.getpid():
            if self._transfer is not None:
                self._check_process()
            return self._outcome()
        with self._lock:
            if self._transfer is not None:
                self._end(self._transfer)
            return self._outcome()

    def _outcome(self) -> int:
        if self._error is not None:
            raise self._error
        return self._nbytes

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise ForkedProcessError(
                f"{self._path}: this transfer was begun by the parent process, where it goes on; begin it again here"
            )

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self._path}: a transfer on its way cannot be copied or pickled: begin it again instead")

    def result(self, timeout: float | None = None) -> int:
        """As :meth:`get`, but wait ``timeout`` seconds at most.

        Raises:
            TimeoutError: it still runs, and goes on.
        """
        if timeout is not None:
            deadline = time.monotonic() + timeout
            pause_s = 50e-6
            while not self.done():
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError(f"{self._path}: the transfer still runs after {timeout} s; it goes on")
                time.sleep(min(pause_s, left_s))
                pause_s = min(2 * pause_s, 2e-3)
        return self.get()

    def cancel(self) -> None:
        """Stop and drain; a later :meth:`get` raises. Of what has ended, nothing changes."""
        transfer = self._transfer
        if transfer is not None:
            transfer.cancel()

    def _end(self, transfer: Transfer) -> None:
        try:
            self.report = self._finish(transfer) if self._finish is not None else transfer.wait()
            self._tell(None)
        except OSError as error:
            self._error = error
            self._tell(error)
        except BaseException as error:
            # Ctrl-C: no byte may move once the caller has control again.
            transfer.cancel()
            self._error = RuntimeError("the transfer was interrupted and cancelled")
            self._tell(error)
            raise
        finally:
            self._transfer = self._finish = self._keepalive = None

    def _tell(self, error: BaseException | None) -> None:
        """Tell who traces how it ended."""
        span, self._span = self._span, None
        if span is not None and error is None:
            span.report = self.report
            span.complete()
        elif span is not None and error is not None:
            span.fail(error)

    def __del__(self) -> None:
        transfer = getattr(self, "_transfer", None)
        if transfer is not None:
            transfer.cancel()  # nobody would ever learn whether the bytes are good
            self._tell(CancelledError(f"{self._path}: nobody waited for the transfer, so it was cancelled"))
