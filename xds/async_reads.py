"""Reads for coroutines: a transfer is awaited, and what is small is read by a thread. Layer: file system.

Nothing here blocks the loop, also where a file system does not answer. Cancelling cancels the transfer and drains it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Sequence
from typing import Any

from xds.arrays import Destination
from xds.backend import Backend, Handle, Transfer
from xds.errors import ShortReadError
from xds.interrupt import begin_in_thread, in_thread
from xds.observe import TRACE, Span
from xds.ranges import Bounds, Range, begin_batch, cat_batch, open_many, resolve_many
from xds.reads import TRANSFER_NBYTES, begin_one, empty_bytes, read_bytes
from xds.report import ReadReport


async def read_bytes_async(backend: Backend, handle: Handle, start: int, end: int) -> bytes:
    """Return the bytes ``start`` to ``end`` (resolved: within the file); see :func:`xds.reads.read_bytes`."""
    nbytes = end - start
    if nbytes < TRANSFER_NBYTES:
        return (await asyncio.to_thread(read_bytes, backend, handle, start, end))[0]
    data, address = empty_bytes(nbytes)

    def begin() -> Transfer:
        transfer = backend.transfer((handle,))
        try:
            begin_one(transfer, Destination(address, nbytes, None, None, data), start, nbytes)
        except BaseException:
            transfer.cancel()
            raise
        return transfer

    with _span(nbytes, handle.path) as span:
        report = await _landed(await begin_in_thread(begin, lambda transfer: transfer.cancel()), (handle,))
        if span is not None:
            span.report = report
    return data


async def cat_many_async(backend: Backend, names: Sequence[str], bounds: Sequence[Bounds], on_error: str) -> list[Any]:
    """Return the bytes of each range; see :meth:`xds.filesystem.StorageFileSystem.cat_ranges`."""
    if on_error not in ("return", "raise"):
        raise ValueError(f"on_error={on_error!r}: must be 'return' or 'raise'")
    handles, failed = await in_thread(open_many, backend, names, on_error)
    try:
        out, todo = resolve_many(names, bounds, handles, failed)
        if len(todo) > 1:
            try:
                filled = await _cat_batch(backend, todo)
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
                out[index] = await read_bytes_async(backend, handle, low, high)
            except OSError as error:
                if on_error == "raise":
                    raise
                out[index] = error
        return out
    finally:
        for handle in handles.values():
            handle.close()


async def _cat_batch(backend: Backend, todo: Sequence[Range]) -> dict[int, bytes]:
    nbytes = sum(high - low for _, _, low, high in todo)
    if nbytes < TRANSFER_NBYTES:
        return await asyncio.to_thread(cat_batch, backend, todo)
    with _span(nbytes, *dict.fromkeys(handle.path for _, handle, _, _ in todo)) as span:
        filled, transfer, handles = await begin_in_thread(
            lambda: begin_batch(backend, todo), lambda begun: begun[1].cancel()
        )
        report = await _landed(transfer, handles)
        if span is not None:
            span.report = report
    return filled


def _span(nbytes: int, *paths: str) -> contextlib.AbstractContextManager[Span | None]:
    return Span("read", *paths, nbytes=nbytes) if TRACE.callbacks else contextlib.nullcontext()


async def _landed(transfer: Transfer, handles: Collection[Handle]) -> ReadReport:
    """Wait for a transfer, and check that its files are what they were; see :func:`xds.reads.unchanged`."""
    try:
        report = await transfer.wait_async()
    except ShortReadError:
        await asyncio.to_thread(_check, handles)
        raise
    await asyncio.to_thread(_check, handles)
    return report


def _check(handles: Collection[Handle]) -> None:
    for handle in handles:
        handle.check_unchanged()
