"""Reads through handles and transfers, into host bytes and into arrays. Layer: file system; knows no backend by name.

Every read ends with :meth:`~xds.backend.Handle.check_unchanged`: what was read from a file that moved is an error.
Small reads into host memory are done here and now, by the calling thread; all others are transfers.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from xds.arrays import Destination
from xds.backend import Backend, Handle, Transfer
from xds.errors import ShortReadError
from xds.observe import TRACE, Span
from xds.plan import segments
from xds.report import TOTALS, ReadReport

#: Host reads of fewer bytes are done by the calling thread: a transfer's threads would cost more than they bring.
TRANSFER_NBYTES = 1 << 20

#: Up to here a second copy is cheaper than the two calls that avoid it.
_COPY_NBYTES = 16 << 10

_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.restype = ctypes.py_object
_new_bytes.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t)
_bytes_address = ctypes.pythonapi.PyBytes_AsString
_bytes_address.restype = ctypes.c_void_p
_bytes_address.argtypes = (ctypes.py_object,)
_view_of_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_of_memory.restype = ctypes.py_object
_view_of_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_READABLE, _WRITABLE = 0x100, 0x200  # PyBUF_READ, PyBUF_WRITE, object.h


def open_handle(backend: Backend, path: str) -> Handle:
    """Open ``path`` for reading; raises what :meth:`xds.backend.Backend.open` raises."""
    if not TRACE.callbacks:
        return backend.open(path)
    with Span("open", path):
        return backend.open(path)


def small_report(nbytes: int, begin: float, commands: int = 1) -> ReadReport:
    """Return and count the report of a read that the calling thread did since ``begin`` (``perf_counter``)."""
    report = ReadReport(
        nbytes,
        {"host": nbytes},
        {"mapped": nbytes},
        {"pread": nbytes},
        engine="inline",
        commands=commands,
        threads=1,
        seconds={"total": time.perf_counter() - begin},
    )
    TOTALS.add(report)
    return report


def empty_bytes(nbytes: int) -> tuple[bytes, int]:
    """Return a new ``bytes`` of undefined content and its address, to be filled before anyone else sees it.

    CPython's own way to make bytes without a second copy (``PyBytes_FromStringAndSize`` with a null pointer); the
    objects of 0 and 1 bytes are shared, hence ``nbytes`` must be more.
    """
    if nbytes < 2:
        raise ValueError(f"empty_bytes({nbytes}): bytes so short are shared objects")
    data = _new_bytes(None, nbytes)
    return data, _bytes_address(data)


def read_bytes(backend: Backend, handle: Handle, start: int, end: int) -> tuple[bytes, ReadReport]:
    """Return the bytes ``start`` to ``end`` of ``handle`` (resolved: within the file) and how they came.

    Raises:
        FileChangedError: the file moved since it was opened.
        ShortReadError: it holds fewer bytes than its size says.
    """
    if not TRACE.callbacks:
        return _read_bytes(backend, handle, start, end)
    with Span("read", handle.path, nbytes=end - start) as span:
        data, span.report = _read_bytes(backend, handle, start, end)
        return data, span.report


def _read_bytes(backend: Backend, handle: Handle, start: int, end: int) -> tuple[bytes, ReadReport]:
    nbytes = end - start
    if nbytes >= TRANSFER_NBYTES:
        data, address = empty_bytes(nbytes)
        report = transfer_one(backend, handle, Destination(address, nbytes, None, None, data), start, nbytes)
        return data, report
    begin = time.perf_counter()
    if nbytes < _COPY_NBYTES:
        buffer = bytearray(nbytes)
        _read_checked(handle, memoryview(buffer), start)
        data = bytes(buffer)
    else:
        data, address = empty_bytes(nbytes)
        _read_checked(handle, _view_of_memory(address, nbytes, _WRITABLE), start)
    return data, small_report(nbytes, begin)


def _read_checked(handle: Handle, view: memoryview, offset: int) -> None:
    try:
        read_small(handle, view, offset)
        handle.check_unchanged()
    except OSError:
        TOTALS.add_error()
        raise


def read_into(
    backend: Backend,
    handle: Handle,
    target: Destination,
    offset: int,
    nbytes: int,
    *,
    require: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
) -> ReadReport:
    """Read ``nbytes`` at ``offset`` (resolved: within the file) into the first bytes of ``target``."""
    if not TRACE.callbacks:
        return _read_into(backend, handle, target, offset, nbytes, require, timeout_s)
    with Span("read", handle.path, nbytes=nbytes) as span:
        report = span.report = _read_into(backend, handle, target, offset, nbytes, require, timeout_s)
        return report


def _read_into(
    backend: Backend,
    handle: Handle,
    target: Destination,
    offset: int,
    nbytes: int,
    require: Mapping[str, str] | None,
    timeout_s: float,
) -> ReadReport:
    if is_small(target, nbytes) and not require:
        begin = time.perf_counter()
        _read_checked(handle, host_view(target, nbytes), offset)
        return small_report(nbytes, begin)
    return transfer_one(backend, handle, target, offset, nbytes, require=require, timeout_s=timeout_s)


def is_small(target: Destination, nbytes: int) -> bool:
    """Whether a read is done by the calling thread."""
    return nbytes == 0 or (target.device is None and nbytes < TRANSFER_NBYTES)


def host_view(target: Destination, nbytes: int) -> memoryview:
    """Return the first ``nbytes`` of host memory as a writable view, valid while ``target`` is held."""
    if nbytes == 0:
        return memoryview(bytearray())
    view: memoryview = _view_of_memory(target.address, nbytes, _WRITABLE)
    return view


def view_of(memory: Destination, nbytes: int) -> memoryview:
    """Return the first ``nbytes`` of host memory as a view for reading, valid while ``memory`` is held."""
    if nbytes == 0:
        return memoryview(b"")
    view: memoryview = _view_of_memory(memory.address, nbytes, _READABLE)
    return view


def read_small(handle: Handle, view: memoryview, offset: int) -> None:
    """Fill ``view`` from ``offset``; raises as :func:`unchanged` does if the file ends before."""
    got = handle.pread_into(view, offset)
    if got != len(view):
        handle.check_unchanged()
        raise ShortReadError(
            f"{handle.path}: {len(view)} bytes at offset {offset} were expected, the file ended after {got}, although "
            f"its size is said to be {handle.nbytes}. Files of /sys and /proc have no true size: read them with open()",
            filename=handle.path,
        )


@contextlib.contextmanager
def unchanged(handles: Collection[Handle]) -> Iterator[None]:
    """Check all ``handles`` at the end; turn a short read into the reason why the file is short."""
    try:
        yield
    except ShortReadError:
        for handle in handles:
            handle.check_unchanged()
        raise
    for handle in handles:
        handle.check_unchanged()


def transfer_one(
    backend: Backend,
    handle: Handle,
    target: Destination,
    offset: int,
    nbytes: int,
    *,
    require: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
) -> ReadReport:
    """Read one range as a transfer, and wait for it."""
    with (
        unchanged((handle,)),
        backend.transfer((handle,), device=target.device, require=require, timeout_s=timeout_s) as transfer,
    ):
        begin_one(transfer, target, offset, nbytes)
        return transfer.wait()


def begin_one(transfer: Transfer, target: Destination, offset: int, nbytes: int) -> None:
    """Give a transfer of one handle its only range."""
    if nbytes:
        segment = segments(1)
        segment[0] = (offset, nbytes, target.address, 0, 0)
        transfer.add(segment, stream=target.stream, keepalive=target.keepalive)
    transfer.seal()


def merge(reports: Collection[ReadReport], begin: float) -> ReadReport:
    """Return one report for reads that ran together since ``begin`` (``perf_counter``)."""
    if len(reports) == 1:
        return next(iter(reports))
    devices = {report.device for report in reports}
    seconds = _sum(report.seconds for report in reports)
    sampled = [(report.resident, report.nbytes) for report in reports if report.resident is not None]
    sampled_nbytes = sum(nbytes for _, nbytes in sampled)
    return ReadReport(
        nbytes=sum(report.nbytes for report in reports),
        posting=_sum(report.posting for report in reports),
        placement=_sum(report.placement for report in reports),
        method=_sum(report.method for report in reports),
        resident=sum(share * nbytes for share, nbytes in sampled) / sampled_nbytes if sampled_nbytes else None,
        engine=" + ".join(sorted({report.engine for report in reports})) or "inline",
        device=devices.pop() if len(devices) == 1 else None,
        commands=sum(report.commands for report in reports),
        retries=sum(report.retries for report in reports),
        threads=max((report.threads for report in reports), default=0),
        pinned_nbytes=max((report.pinned_nbytes for report in reports), default=0),
        seconds={**seconds, "total": time.perf_counter() - begin},
        notes=tuple(dict.fromkeys(note for report in reports for note in report.notes)),
    )


def _sum(mappings: Any) -> dict[str, Any]:
    total: dict[str, Any] = {}
    for mapping in mappings:
        for key, value in mapping.items():
            total[key] = total.get(key, 0) + value
    return total
