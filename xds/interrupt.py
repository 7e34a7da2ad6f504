"""Work in threads that a cancelled coroutine ends. Layer: bottom; imports nothing of ours but errors.

A thread cannot be cancelled from outside. What runs long (copies, many files) therefore calls :func:`checkpoint`
between two pieces, and ends there once nobody waits for it any more.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from xds.errors import CancelledError

_P = ParamSpec("_P")
_T = TypeVar("_T")

_CANCELLED: contextvars.ContextVar[threading.Event | None] = contextvars.ContextVar("xds_cancelled", default=None)


def checkpoint() -> None:
    """Raise if the coroutine that this thread works for was cancelled.

    Raises:
        CancelledError: nobody waits for the result.
    """
    event = _CANCELLED.get()
    if event is not None and event.is_set():
        raise CancelledError("the coroutine that waited for this was cancelled")


async def in_thread(function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Run ``function`` in a thread; if the coroutine is cancelled, end it at its next checkpoint and wait for that.

    Hence, once the coroutine has ended, nothing is written any more. For what changes files or memory of the caller.
    """
    event = threading.Event()

    def run() -> _T:
        _CANCELLED.set(event)
        checkpoint()
        return function(*args, **kwargs)

    work = asyncio.ensure_future(asyncio.to_thread(run))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        event.set()
        await drained(work)
        raise


async def begin_in_thread(begin: Callable[[], _T], undo: Callable[[_T], object]) -> _T:
    """As :func:`in_thread`, for what goes on when ``begin`` has returned: ``undo`` ends it if the coroutine cannot."""
    work = asyncio.ensure_future(asyncio.to_thread(begin))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await drained(work)
        if not work.cancelled() and work.exception() is None:
            await drained(asyncio.ensure_future(asyncio.to_thread(undo, work.result())))
        raise


async def drained(work: asyncio.Future[Any]) -> None:
    """Wait until ``work`` has ended, well or not, however often the waiting coroutine is cancelled."""
    while not work.done():
        try:
            await asyncio.wait((work,))
        except asyncio.CancelledError:
            continue
    if not work.cancelled():
        work.exception()
