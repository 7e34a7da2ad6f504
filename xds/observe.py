"""Who wants to know what is read and written: collected reports, trace callbacks, NVTX. Layer: just above reports.

Whoever works asks ``if TRACE.callbacks:`` first, and makes a :class:`Span` only then: without listeners the cost is one
look at an attribute.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

from xds.report import TOTALS, Reports

_log = logging.getLogger("xds.trace")


@contextlib.contextmanager
def collect() -> Iterator[Reports]:
    """Collect the report of every read and write that ends within the block, in whatever thread or library.

    Blocks may be nested; each gets all. What still runs when a block ends is not in its list.

    Returns:
        A list of reports, to be read at any time; ``errors`` counts what failed.
    """
    reports = Reports()
    TOTALS.collect(reports)
    try:
        yield reports
    finally:
        TOTALS.release(reports)


@dataclass(frozen=True, slots=True)
class Started:
    """Something begins.

    Attributes:
        name: what: ``open``, ``info``, ``list``, ``read``, ``write``, ``load``, ...
        paths: of which files.
        nbytes: bytes asked for; ``None`` where nobody knows yet.
        number: the same in the event of the end, and in no other.
    """

    name: str
    paths: tuple[str, ...]
    nbytes: int | None
    number: int


@dataclass(frozen=True, slots=True)
class Complete:
    """Something ended well.

    Attributes:
        name: as of :class:`Started`.
        paths: as of :class:`Started`.
        nbytes: bytes that moved; ``None`` for what moves none.
        number: as of :class:`Started`.
        seconds: wall time since the start.
        report: how the bytes travelled, where there is one.
    """

    name: str
    paths: tuple[str, ...]
    nbytes: int | None
    number: int
    seconds: float
    report: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """Something failed.

    Attributes:
        name: as of :class:`Started`.
        paths: as of :class:`Started`.
        nbytes: bytes asked for.
        number: as of :class:`Started`.
        seconds: wall time since the start.
        error: why.
    """

    name: str
    paths: tuple[str, ...]
    nbytes: int | None
    number: int
    seconds: float
    error: BaseException


Event: TypeAlias = Started | Complete | Failed
Callback: TypeAlias = Callable[[Event], object]


class _Busy(threading.local):
    """Whether this thread runs a callback."""

    now = False


class _Trace:
    """The callbacks of this process."""

    def __init__(self) -> None:
        #: Replaced whole, so that whoever looks needs no lock.
        self.callbacks: tuple[Registration, ...] = ()
        self._lock = threading.Lock()
        self._busy = _Busy()
        self._numbers = itertools.count(1)

    def after_fork(self) -> None:
        """Take a new lock: the old one may be held by a thread that the child does not have."""
        self._lock = threading.Lock()

    def add(self, registration: Registration) -> None:
        with self._lock:
            self.callbacks = (*self.callbacks, registration)

    def remove(self, registration: Registration) -> None:
        with self._lock:
            self.callbacks = tuple(other for other in self.callbacks if other is not registration)

    def number(self) -> int:
        return next(self._numbers)

    def tell(self, listeners: Iterable[Registration], event: Event) -> None:
        """Call each listener."""
        before, self._busy.now = self._busy.now, True
        try:
            for listener in listeners:
                listener.call(event)
        finally:
            self._busy.now = before

    def listeners(self) -> tuple[Registration, ...]:
        """Return who hears of what starts now: nobody, if a callback starts it, as that would never end."""
        return () if self._busy.now else self.callbacks


class Registration:
    """A callback that listens until :meth:`close`, or until the end of a ``with`` block."""

    def __init__(self, callback: Callback) -> None:
        self._callback = callback
        self._told = False

    def call(self, event: Event) -> None:
        """Call back; an exception is logged, the first time."""
        try:
            self._callback(event)
        except Exception:
            if not self._told:
                self._told = True
                _log.exception("the trace callback %r failed; it is called on, and not reported again", self._callback)

    def close(self) -> None:
        """Listen no more, but to the end of what has started; a second call does nothing."""
        TRACE.remove(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Span:
    """From the start of something to its end: as a ``with`` block, or by :meth:`complete` and :meth:`fail`.

    Who hears of the start hears of the end, even if it has been unregistered meanwhile.

    Attributes:
        nbytes: bytes asked for; to be set to those that moved.
        report: to be set where there is one; its bytes are those that moved.
    """

    __slots__ = ("_begin", "_listeners", "_name", "_number", "_paths", "nbytes", "report")

    def __init__(self, name: str, *paths: str, nbytes: int | None = None) -> None:
        self._name, self._paths, self.nbytes = name, paths, nbytes
        self.report: Any = None
        self._listeners = TRACE.listeners()
        self._number = TRACE.number()
        TRACE.tell(self._listeners, Started(name, paths, nbytes, self._number))
        self._begin = time.perf_counter()

    def complete(self) -> None:
        """Tell that it ended well."""
        seconds = time.perf_counter() - self._begin
        nbytes = self.nbytes if self.report is None else self.report.nbytes
        listeners, self._listeners = self._listeners, ()
        TRACE.tell(listeners, Complete(self._name, self._paths, nbytes, self._number, seconds, self.report))

    def fail(self, error: BaseException) -> None:
        """Tell that it failed."""
        seconds = time.perf_counter() - self._begin
        listeners, self._listeners = self._listeners, ()
        TRACE.tell(listeners, Failed(self._name, self._paths, self.nbytes, self._number, seconds, error))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.complete()
        else:
            self.fail(error)


def trace(callback: Callback) -> Registration:
    """Call ``callback`` with an event whenever something starts, completes or fails, in whatever thread.

    It runs in the thread that works, and holds it up: be quick. An exception that it raises is logged once (logger
    ``xds.trace``) and breaks nothing. What it reads itself makes no events.

    Returns:
        What unregisters it: by ``close()``, or at the end of a ``with`` block.
    """
    if not callable(callback):
        raise TypeError(f"a trace callback must be callable, not {type(callback).__name__}")
    registration = Registration(callback)
    TRACE.add(registration)
    return registration


class _NvtxRanges:
    """Shows events as ranges of the NVTX domain ``xds``, which may end in another thread than they start in."""

    def __init__(self) -> None:
        try:
            import nvtx
        except ImportError as error:
            raise ImportError(
                f"NVTX ranges need the package nvtx, which cannot be imported: {error}; pip install nvtx"
            ) from error
        self._nvtx = nvtx
        self._ranges: dict[int, Any] = {}

    def __call__(self, event: Event) -> None:
        if isinstance(event, Started):
            first = f" {event.paths[0]}" if event.paths else ""
            more = f" and {len(event.paths) - 1} more" if len(event.paths) > 1 else ""
            message = f"{event.name}{first}{more}"
            self._ranges[event.number] = self._nvtx.start_range(message=message, domain="xds", category=event.name)
        else:
            self._nvtx.end_range(self._ranges.pop(event.number))


_nvtx_registration: Registration | None = None


def trace_nvtx(enabled: bool = True) -> None:
    """Show all that is read and written as NVTX ranges (domain ``xds``), or show them no more.

    ``XDS_NVTX=1`` in the environment does the same from the start.

    Raises:
        ImportError: the package ``nvtx`` is not there.
    """
    global _nvtx_registration
    if enabled and _nvtx_registration is None:
        _nvtx_registration = trace(_NvtxRanges())
    elif not enabled and _nvtx_registration is not None:
        _nvtx_registration.close()
        _nvtx_registration = None


#: Who listens; see the head of this module.
TRACE = _Trace()
os.register_at_fork(after_in_child=TRACE.after_fork)
if os.environ.get("XDS_NVTX", "0") not in ("", "0"):
    try:
        trace_nvtx()
    except ImportError as failure:
        _log.warning("XDS_NVTX=%s has no effect: %s", os.environ["XDS_NVTX"], failure)
