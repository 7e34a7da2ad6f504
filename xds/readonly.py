"""All that writes, refused at once and by one error. Layer: file system."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from fsspec.asyn import AsyncFileSystem

from xds.errors import ReadOnlyError


class ReadOnlyFileSystem(AsyncFileSystem):  # type: ignore[misc] # fsspec has no types
    """A file system whose writing methods raise :class:`~xds.errors.ReadOnlyError` (``EROFS``) when called."""

    def _read_only(self, what: str, path: Any = None) -> NoReturn:
        name = None if path is None else str(path)
        raise ReadOnlyError(
            f"{type(self).protocol}:// only reads: cannot {what}{f' {name}' if name else ''}", filename=name
        )

    def mkdir(self, path: Any, create_parents: bool = True, **kwargs: Any) -> NoReturn:
        """Raise :class:`ReadOnlyError`, as all that writes does."""
        self._read_only("make the folder", path)

    def makedirs(self, path: Any, exist_ok: bool = False) -> NoReturn:
        """Raise :class:`ReadOnlyError`."""
        self._read_only("make the folder", path)

    def rmdir(self, path: Any) -> NoReturn:
        """Raise :class:`ReadOnlyError`."""
        self._read_only("remove the folder", path)

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None, **kwargs: Any) -> NoReturn:
        """Raise :class:`ReadOnlyError`."""
        self._read_only("remove", path)

    def rm_file(self, path: Any, **kwargs: Any) -> NoReturn:
        """Raise :class:`ReadOnlyError`."""
        self._read_only("remove", path)

    def cp_file(self, path1: Any, path2: Any, **kwargs: Any) -> NoReturn:
        """Raise :class:`ReadOnlyError`."""
        self._read_only("copy to", path2)

    def copy(self, path1: Any, path2: Any, recursive: bool = False, **kwargs: Any) -> NoReturn:
        """Raise :class:`ReadOnlyError`."""
        self._read_only("copy to", path2)

    def mv(self, path1: Any, path2: Any, recursive: bool = False, **kwargs: Any) -> NoReturn:
        """Raise :class:`ReadOnlyError`."""
        self._read_only("move", path1)

    def mv_file(self, path1: Any, path2: Any, **kwargs: Any) -> NoReturn:
        """Raise :class:`ReadOnlyError`."""
        self._read_only("move", path1)

    def put(self, lpath: Any, rpath: Any, recursive: bool = False, **kwargs: Any) -> NoReturn:
        """Raise :class:`ReadOnlyError`."""
        self._read_only("write", rpath)

    def put_file(self, lpath: Any, rpath: Any, **kwargs: Any) -> NoReturn:
        """Raise :class:`ReadOnlyError`."""
        self._read_only("write", rpath)

    def pipe(self, path: Any, value: Any = None, **kwargs: Any) -> NoReturn:
        """Raise :class:`ReadOnlyError`."""
        self._read_only("write", ", ".join(map(str, path)) if isinstance(path, Mapping) else path)

    def pipe_file(self, path: Any, value: Any, **kwargs: Any) -> NoReturn:
        """Raise :class:`ReadOnlyError`."""
        self._read_only("write", path)

    def touch(self, path: Any, truncate: bool = True, **kwargs: Any) -> NoReturn:
        """Raise :class:`ReadOnlyError`."""
        self._read_only("touch", path)

    async def _mkdir(self, path: Any, *args: Any, **kwargs: Any) -> None:
        self.mkdir(path)

    async def _makedirs(self, path: Any, *args: Any, **kwargs: Any) -> None:
        self.makedirs(path)

    async def _rm(self, path: Any, *args: Any, **kwargs: Any) -> None:
        self.rm(path)

    async def _rm_file(self, path: Any, *args: Any, **kwargs: Any) -> None:
        self.rm_file(path)

    async def _cp_file(self, path1: Any, path2: Any, **kwargs: Any) -> None:
        self.cp_file(path1, path2)

    async def _copy(self, path1: Any, path2: Any, *args: Any, **kwargs: Any) -> None:
        self.copy(path1, path2)

    async def _mv_file(self, path1: Any, path2: Any) -> None:
        self.mv_file(path1, path2)

    async def _put_file(self, lpath: Any, rpath: Any, *args: Any, **kwargs: Any) -> None:
        self.put_file(lpath, rpath)

    async def _put(self, lpath: Any, rpath: Any, *args: Any, **kwargs: Any) -> None:
        self.put(lpath, rpath)

    async def _pipe_file(self, path: Any, value: Any, *args: Any, **kwargs: Any) -> None:
        self.pipe_file(path, value)

    async def _pipe(self, path: Any, value: Any = None, *args: Any, **kwargs: Any) -> None:
        self.pipe(path, value)
