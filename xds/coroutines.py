"""The coroutines of a file system: transfers are awaited, all else runs in threads. Layer: file system.

A coroutine never blocks its loop. One that is cancelled cancels what it began, and ends when nothing of it can change
a file or an array any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

from xds.async_reads import cat_many_async, read_bytes_async
from xds.interrupt import in_thread
from xds.plan import resolve_range
from xds.reads import open_handle
from xds.writable import WritableFileSystem


class CoroutineFileSystem(WritableFileSystem):
    """The coroutines that fsspec's asynchronous callers await (``asynchronous=True``)."""

    # What only asks: a thread that hangs may be left behind, as it changes nothing.

    async def _info(self, path: Any, **kwargs: Any) -> dict[str, Any]:
        return await asyncio.to_thread(self.info, path, **kwargs)

    async def _ls(self, path: Any, detail: bool = True, **kwargs: Any) -> list[Any]:
        return await asyncio.to_thread(self.ls, path, detail, **kwargs)

    async def _exists(self, path: Any, **kwargs: Any) -> bool:
        return await asyncio.to_thread(self.exists, path, **kwargs)

    async def _isfile(self, path: Any) -> bool:
        return await asyncio.to_thread(self.isfile, path)

    async def _isdir(self, path: Any) -> bool:
        return await asyncio.to_thread(self.isdir, path)

    async def _size(self, path: Any) -> int | None:
        return await asyncio.to_thread(self.size, path)

    async def _sizes(self, paths: Iterable[Any], **kwargs: Any) -> list[int | None]:
        return await asyncio.to_thread(self.sizes, paths)

    async def _walk(self, path: Any, *args: Any, **kwargs: Any) -> AsyncIterator[tuple[str, Any, Any]]:
        steps = self.walk(path, *args, **kwargs)
        while (step := await asyncio.to_thread(next, steps, None)) is not None:
            yield step

    async def _find(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        return await asyncio.to_thread(self.find, path, *args, **kwargs)

    async def _glob(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        return await asyncio.to_thread(self.glob, path, *args, **kwargs)

    async def _du(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        return await asyncio.to_thread(self.du, path, *args, **kwargs)

    async def _expand_path(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        return await asyncio.to_thread(self.expand_path, path, *args, **kwargs)

    # Bytes.

    async def _cat_file(self, path: Any, start: Any = None, end: Any = None, **kwargs: Any) -> bytes:
        name = self._strip_protocol(path)
        handle = await asyncio.to_thread(open_handle, self.backend, name)
        try:
            return await read_bytes_async(self.backend, handle, *resolve_range(start, end, handle.nbytes))
        finally:
            handle.close()

    async def _cat_ranges(
        self,
        paths: list[Any],
        starts: Any,
        ends: Any,
        max_gap: int | None = None,
        batch_size: int | None = None,
        on_error: str = "return",
        **kwargs: Any,
    ) -> list[Any]:
        names, bounds = self._ranges(paths, starts, ends)
        return await cat_many_async(self.backend, names, bounds, on_error)

    async def _cat(
        self, path: Any, recursive: bool = False, on_error: str = "raise", batch_size: int | None = None, **kwargs: Any
    ) -> Any:
        names = await self._expand_path(path, recursive=recursive)
        start, end = kwargs.get("start"), kwargs.get("end")
        found = await asyncio.gather(*(self._cat_file(name, start, end) for name in names), return_exceptions=True)
        for one in found:
            if isinstance(one, BaseException) and (on_error == "raise" or not isinstance(one, Exception)):
                raise one
        if len(names) == 1 and not isinstance(path, list) and names[0] == self._strip_protocol(path):
            return found[0]
        return {
            name: one
            for name, one in zip(names, found, strict=True)
            if on_error != "omit" or not isinstance(one, BaseException)
        }

    # What changes files.

    async def _get_file(self, rpath: Any, lpath: Any, **kwargs: Any) -> None:
        await in_thread(self.get_file, rpath, lpath, **kwargs)

    async def _get(self, rpath: Any, lpath: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("batch_size", None)
        await in_thread(self.get, rpath, lpath, *args, **kwargs)

    async def _put_file(self, lpath: Any, rpath: Any, *args: Any, **kwargs: Any) -> None:
        await in_thread(self.put_file, lpath, rpath, *args, **kwargs)

    async def _put(self, lpath: Any, rpath: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("batch_size", None)
        await in_thread(self.put, lpath, rpath, *args, **kwargs)

    async def _pipe_file(self, path: Any, value: Any, *args: Any, **kwargs: Any) -> None:
        await in_thread(self.pipe_file, path, value, *args, **kwargs)

    async def _pipe(self, path: Any, value: Any = None, batch_size: int | None = None, **kwargs: Any) -> None:
        await in_thread(self.pipe, path, value, **kwargs)

    async def _cp_file(self, path1: Any, path2: Any, **kwargs: Any) -> None:
        await in_thread(self.cp_file, path1, path2, **kwargs)

    async def _copy(self, path1: Any, path2: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("batch_size", None)
        await in_thread(self.copy, path1, path2, *args, **kwargs)

    async def _mv(self, path1: Any, path2: Any, **kwargs: Any) -> None:
        await in_thread(self.mv, path1, path2, **kwargs)

    async def _mv_file(self, path1: Any, path2: Any, **kwargs: Any) -> None:
        await in_thread(self.mv_file, path1, path2)

    async def _rm(self, path: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("batch_size", None)
        await in_thread(self.rm, path, *args, **kwargs)

    async def _rm_file(self, path: Any, **kwargs: Any) -> None:
        await in_thread(self.rm_file, path)

    async def _mkdir(self, path: Any, create_parents: bool = True, **kwargs: Any) -> None:
        await in_thread(self.mkdir, path, create_parents, **kwargs)

    async def _makedirs(self, path: Any, exist_ok: bool = False) -> None:
        await in_thread(self.makedirs, path, exist_ok)

    async def _rmdir(self, path: Any) -> None:
        await in_thread(self.rmdir, path)

    async def _touch(self, path: Any, truncate: bool = True, **kwargs: Any) -> None:
        await in_thread(self.touch, path, truncate, **kwargs)
