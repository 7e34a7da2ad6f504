"""Many ranges of many files at once, into bytes and into arrays. Layer: file system; knows no backend by name."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from xds.arrays import Destination, destination
from xds.backend import Backend, Handle, Transfer
from xds.errors import ArrayError
from xds.observe import TRACE, Span
from xds.plan import resolve_range, segments
from xds.reads import (
    TRANSFER_NBYTES,
    empty_bytes,
    host_view,
    is_small,
    merge,
    open_handle,
    read_bytes,
    read_small,
    small_report,
    unchanged,
)
from xds.report import TOTALS, ReadReport

#: Start and end of a slice.
Bounds = tuple[Any, Any]

#: Place in the result, handle, resolved start and end.
Range = tuple[int, Handle, int, int]


def cat_many(backend: Backend, names: Sequence[str], bounds: Sequence[Bounds], on_error: str) -> list[Any]:
    """Return the bytes of each range; see :meth:`xds.filesystem.StorageFileSystem.cat_ranges`."""
    if on_error not in ("return", "raise"):
        raise ValueError(f"on_error={on_error!r}: must be 'return' or 'raise'")
    handles, failed = open_many(backend, names, on_error)
    with contextlib.ExitStack() as stack:
        for handle in handles.values():
            stack.callback(handle.close)
        out, todo = resolve_many(names, bounds, handles, failed)
        if len(todo) > 1:
            try:
                filled = cat_batch(backend, todo)
            except OSError:
                if on_error == "raise":
                    raise
                # Read one by one below, to learn which of the ranges it was.
            else:
                for index, data in filled.items():
                    out[index] = data
                return out
        for index, handle, low, high in todo:
            try:
                out[index] = read_bytes(backend, handle, low, high)[0]
            except OSError as error:
                if on_error == "raise":
                    raise
                out[index] = error
    return out


def open_many(backend: Backend, names: Sequence[str], on_error: str) -> tuple[dict[str, Handle], dict[str, OSError]]:
    """Open each file once; return the handles, which are the caller's, and what failed (``on_error="return"``)."""
    handles: dict[str, Handle] = {}
    failed: dict[str, OSError] = {}
    for name in dict.fromkeys(names):
        try:
            handles[name] = open_handle(backend, name)
        except OSError as error:
            if on_error == "raise":
                for handle in handles.values():
                    handle.close()
                raise
            failed[name] = error
    return handles, failed


def resolve_many(
    names: Sequence[str], bounds: Sequence[Bounds], handles: Mapping[str, Handle], failed: Mapping[str, OSError]
) -> tuple[list[Any], list[Range]]:
    """Return the list of results, with the errors of files that could not be opened, and what is to be read."""
    out: list[Any] = [failed.get(name) for name in names]
    todo = [
        (index, handles[name], *resolve_range(start, end, handles[name].nbytes))
        for index, (name, (start, end)) in enumerate(zip(names, bounds, strict=True))
        if name in handles
    ]
    return out, todo


def cat_batch(backend: Backend, todo: Sequence[Range]) -> dict[int, bytes]:
    """Return the bytes of each range, read together."""
    nbytes = sum(high - low for _, _, low, high in todo)
    is_wide = nbytes >= TRANSFER_NBYTES
    if not TRACE.callbacks:
        return (_cat_transfer(backend, todo) if is_wide else _cat_small(todo))[0]
    with Span("read", *dict.fromkeys(handle.path for _, handle, _, _ in todo), nbytes=nbytes) as span:
        filled, span.report = _cat_transfer(backend, todo) if is_wide else _cat_small(todo)
    return filled


def _cat_small(todo: Sequence[Range]) -> tuple[dict[int, bytes], ReadReport]:
    """Return the bytes of each range, read by the calling thread."""
    begin = time.perf_counter()
    filled: dict[int, bytes] = {}
    nbytes = 0
    with _counting_errors(), unchanged({handle for _, handle, _, _ in todo}):
        for index, handle, low, high in todo:
            buffer = bytearray(high - low)
            read_small(handle, memoryview(buffer), low)
            filled[index] = bytes(buffer)
            nbytes += high - low
    return filled, small_report(nbytes, begin, len(todo))


def _cat_transfer(backend: Backend, todo: Sequence[Range]) -> tuple[dict[int, bytes], ReadReport]:
    """Return the bytes of each range, moved by one transfer."""
    filled, transfer, handles = begin_batch(backend, todo)
    with unchanged(handles), transfer:
        return filled, transfer.wait()


def begin_batch(backend: Backend, todo: Sequence[Range]) -> tuple[dict[int, bytes], Transfer, list[Handle]]:
    """Begin one transfer of all ranges; return what it fills, itself, and the files whose bytes it brings."""
    handles = list(dict.fromkeys(handle for _, handle, _, _ in todo))
    places = {handle: place for place, handle in enumerate(handles)}
    rows = []
    filled: dict[int, bytes] = {}
    for index, handle, low, high in todo:
        nbytes = high - low
        if nbytes < 2:  # shared objects, see empty_bytes
            filled[index] = read_bytes(backend, handle, low, high)[0]
        else:
            filled[index], address = empty_bytes(nbytes)
            rows.append((low, nbytes, address, places[handle], 0))
    batch = segments(len(rows))
    batch[:] = rows
    transfer = backend.transfer(handles)
    try:
        transfer.add(batch, keepalive=filled)
        transfer.seal()
    except BaseException:
        transfer.cancel()
        raise
    return filled, transfer, handles


@contextlib.contextmanager
def _counting_errors() -> Iterator[None]:
    try:
        yield
    except OSError:
        TOTALS.add_error()
        raise


def readinto_many(
    backend: Backend,
    names: Sequence[str],
    bounds: Sequence[Bounds],
    arrays: Sequence[Any],
    *,
    stream: Any = None,
    require: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
) -> ReadReport:
    """Fill each array with its range; see :meth:`xds.filesystem.StorageFileSystem.readinto_ranges`."""
    if not TRACE.callbacks:
        return _readinto_many(backend, names, bounds, arrays, stream, require, timeout_s)
    with Span("read", *dict.fromkeys(names)) as span:
        report = span.report = _readinto_many(backend, names, bounds, arrays, stream, require, timeout_s)
        return report


def _readinto_many(
    backend: Backend,
    names: Sequence[str],
    bounds: Sequence[Bounds],
    arrays: Sequence[Any],
    stream: Any,
    require: Mapping[str, str] | None,
    timeout_s: float,
) -> ReadReport:
    begin = time.perf_counter()
    if len(arrays) != len(names):
        raise ValueError(f"{len(arrays)} arrays for {len(names)} paths")
    targets = [destination(array, stream=stream) for array in arrays]
    _refuse_overlap(targets)
    with contextlib.ExitStack() as stack:
        handles: dict[str, Handle] = {}
        for name in names:
            if name not in handles:
                handles[name] = open_handle(backend, name)
                stack.callback(handles[name].close)
        offsets = []
        for index, (name, (start, end), target) in enumerate(zip(names, bounds, targets, strict=True)):
            size = handles[name].nbytes
            low, high = resolve_range(start, end, size)
            if high - low != target.nbytes:
                raise ArrayError(
                    f"{name}: range {index}, bytes {start} to {end} of a file of {size} bytes, holds {high - low} "
                    f"bytes, but its array has {target.nbytes}; give an array of the size of the range"
                )
            offsets.append(low)
        if not require and is_small_batch(targets):
            return _read_small_batch(list(handles.values()), [handles[name] for name in names], offsets, targets)
        places = {name: place for place, name in enumerate(handles)}
        opened = list(handles.values())
        files = [places[name] for name in names]
        stack.enter_context(unchanged(opened))
        reports = _transfer_batches(backend, opened, files, offsets, targets, require, timeout_s)
    return merge(reports, begin)


def _transfer_batches(
    backend: Backend,
    handles: list[Handle],
    files: list[int],
    offsets: list[int],
    targets: list[Destination],
    require: Mapping[str, str] | None,
    timeout_s: float,
) -> list[ReadReport]:
    """Run one transfer a device, one batch a stream; all transfers are made before the first byte moves."""
    batches: dict[int | None, dict[int | None, list[int]]] = {}
    for index, target in enumerate(targets):
        batches.setdefault(target.device, {}).setdefault(target.stream, []).append(index)
    if not batches:
        batches[None] = {}
    with contextlib.ExitStack() as stack:
        transfers: dict[int | None, Transfer] = {}
        for device in batches:
            transfers[device] = stack.enter_context(
                backend.transfer(handles, device=device, require=require, timeout_s=timeout_s)
            )
        for device, streams in batches.items():
            for stream, indices in streams.items():
                rows = [
                    (offsets[index], targets[index].nbytes, targets[index].address, files[index], 0)
                    for index in indices
                    if targets[index].nbytes
                ]
                if rows:
                    batch = segments(len(rows))
                    batch[:] = rows
                    keepalive = [targets[index].keepalive for index in indices]
                    transfers[device].add(batch, stream=stream, keepalive=keepalive)
            transfers[device].seal()
        return [transfer.wait() for transfer in transfers.values()]


def is_small_batch(targets: Iterable[Destination]) -> bool:
    """Whether the calling thread reads all ranges itself."""
    nbytes = 0
    for target in targets:
        nbytes += target.nbytes
        if nbytes >= TRANSFER_NBYTES or not is_small(target, target.nbytes):
            return False
    return True


def _read_small_batch(
    opened: list[Handle], handles: list[Handle], offsets: list[int], targets: list[Destination]
) -> ReadReport:
    begin = time.perf_counter()
    with _counting_errors(), unchanged(opened):
        for handle, offset, target in zip(handles, offsets, targets, strict=True):
            read_small(handle, host_view(target, target.nbytes), offset)
    return small_report(sum(target.nbytes for target in targets), begin, len(targets))


def _refuse_overlap(targets: Sequence[Destination]) -> None:
    spans = sorted(
        (-1 if target.device is None else target.device, target.address, target.nbytes, index)
        for index, target in enumerate(targets)
        if target.nbytes
    )
    for (device, address, nbytes, index), (next_device, next_address, _, next_index) in itertools.pairwise(spans):
        if device == next_device and next_address < address + nbytes:
            raise ArrayError(f"arrays {index} and {next_index} overlap: each range needs memory of its own")
