"""fsspec's file systems: one shared base, one small class a protocol. Layer: file system; knows no backend by name.

fsspec gives an :class:`~fsspec.asyn.AsyncFileSystem` synchronous methods that hop over an event loop, wherever the
class has the default ones. Here each is defined, hence none hops: a small read costs microseconds, and an instance
that came through a fork still reads. What writes is in :mod:`xds.writable`, the coroutines are in
:mod:`xds.coroutines`, the options in :mod:`xds.options`.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterable, Iterator, Mapping, Sequence
from glob import has_magic
from typing import Any

from fsspec.utils import tokenize

from xds import url
from xds.coroutines import CoroutineFileSystem
from xds.file import StorageFile
from xds.observe import TRACE, Span
from xds.plan import resolve_range
from xds.ranges import Bounds, cat_many, readinto_many
from xds.reads import open_handle, read_bytes
from xds.report import ReadReport
from xds.wrapped_file import TextFile, closing_both
from xds.writer_file import WriterFile, write_mode

_NOT_FOUND = (FileNotFoundError, NotADirectoryError)


class StorageFileSystem(CoroutineFileSystem):
    """Base of all protocols of XDS: listings never cached, one instance for all threads.

    A subclass says ``protocol`` and whether URLs name a host (``authority``). All options of fsspec's file systems are
    accepted, and those that nobody knows.

    Args:
        auto_mkdir: make the folders above a file that is opened for writing, touched, copied or moved to.
        block_size: default of :meth:`open`: block of the cache for reading, buffer for writing; bytes.
        cache_type: default of :meth:`open`; a cache of fsspec, ``none`` by default.
        fsync: what must be on the storage when a file is closed: ``none``, ``data`` (bytes), ``full`` (name too).
        require: default of all reads and writes of arrays: ``{"posting": ..., "placement": ...}``.
        timeout_s: default of all reads and writes of arrays: longest time without progress.
    """

    # Names.

    def info(self, path: Any, **kwargs: Any) -> dict[str, Any]:
        """Return name, size, type, mtime, created, mode, ino, nlink, uid, gid, islink, identity of ``path``.

        Links are followed (``islink``, ``destination``); the type of a link that leads nowhere is ``link``.
        """
        name = self._strip_protocol(path)
        if not TRACE.callbacks:
            return self.backend.info(name)
        with Span("info", name):
            return self.backend.info(name)

    def ls(self, path: Any, detail: bool = True, **kwargs: Any) -> list[Any]:
        """Return the entries of a folder, sorted by name, or the entry of a file; names only without ``detail``."""
        name = self._strip_protocol(path)
        with Span("list", name) if TRACE.callbacks else contextlib.nullcontext():
            entries = self.backend.ls(name)
        return entries if detail else [entry["name"] for entry in entries]

    def exists(self, path: Any, **kwargs: Any) -> bool:
        """Return whether ``path`` leads anywhere; what keeps us from knowing (permission, ...) is raised."""
        return self._type(path) not in (None, "link")

    def lexists(self, path: Any, **kwargs: Any) -> bool:
        """As :meth:`exists`, but true for links that lead nowhere."""
        return self._type(path) is not None

    def isfile(self, path: Any) -> bool:
        """Return whether ``path`` is a file or block device; raises as :meth:`exists`."""
        return self._type(path) == "file"

    def isdir(self, path: Any) -> bool:
        """Return whether ``path`` is a folder; raises as :meth:`exists`."""
        return self._type(path) == "directory"

    def islink(self, path: Any) -> bool:
        """Return whether ``path`` is a symbolic link."""
        try:
            return bool(self.info(path).get("islink"))
        except _NOT_FOUND:
            return False

    def _type(self, path: Any) -> str | None:
        try:
            kind: str = self.info(path)["type"]
        except _NOT_FOUND:
            return None
        return kind

    def size(self, path: Any) -> int | None:
        """Return bytes, ``None`` where nobody knows."""
        size: int | None = self.info(path)["size"]
        return size

    def sizes(self, paths: Iterable[Any]) -> list[int | None]:
        """Return :meth:`size` of each path."""
        return [self.size(path) for path in paths]

    def modified(self, path: Any) -> datetime.datetime:
        """Return the time of the last change of the bytes (aware, UTC)."""
        return datetime.datetime.fromtimestamp(self.info(path)["mtime"], datetime.UTC)

    def created(self, path: Any) -> datetime.datetime:
        """Return the ``created`` time of :meth:`info` (aware, UTC)."""
        return datetime.datetime.fromtimestamp(self.info(path)["created"], datetime.UTC)

    def ukey(self, path: Any) -> str:
        """Return a token that changes when the bytes of ``path`` may have changed, and only then."""
        info = self.info(path)
        token: str = tokenize(info["name"], info["identity"])
        return token

    def checksum(self, path: Any) -> int:
        """Return :meth:`ukey` as a number."""
        return int(self.ukey(path), 16)

    def walk(
        self, path: Any, maxdepth: int | None = None, topdown: bool = True, on_error: Any = "omit", **kwargs: Any
    ) -> Iterator[tuple[str, Any, Any]]:
        """Yield (folder, folders in it, files in it), as :func:`os.walk` does.

        Links to folders are listed among the folders and not entered: they may lead back up.
        """
        if maxdepth is not None and maxdepth < 1:
            raise ValueError("maxdepth must be at least 1")
        detail = kwargs.pop("detail", False)
        path = self._strip_protocol(path)
        try:
            listing = self.ls(path, detail=True, **kwargs)
        except OSError as error:
            if on_error == "raise":
                raise
            if callable(on_error):
                on_error(error)
            return
        folders: dict[str, Any] = {}
        files: dict[str, Any] = {}
        for entry in listing:
            name = "" if entry["name"] == path else entry["name"].rpartition("/")[2]
            (folders if entry["type"] == "directory" else files)[name] = entry
        # As in os.walk, the caller may remove folders from what it is given before they are entered.
        given: Any = folders if detail else list(folders)
        here = (path, given, files if detail else list(files))
        if topdown:
            yield here
        if maxdepth is None or maxdepth > 1:
            below = None if maxdepth is None else maxdepth - 1
            for name in list(given):
                if name in folders and not folders[name].get("islink"):
                    yield from self.walk(
                        folders[name]["name"], below, topdown=topdown, on_error=on_error, detail=detail, **kwargs
                    )
        if not topdown:
            yield here

    # fsspec's own algorithms, which call the methods above; defined so that the mirror leaves them alone.

    def find(self, path: Any, maxdepth: int | None = None, withdirs: bool = False, **kwargs: Any) -> Any:
        """Return all files below ``path``."""
        # fsspec's glob passes a stem on to backends that can filter by it on their server.
        kwargs.pop("prefix", None)
        return super().find(path, maxdepth=maxdepth, withdirs=withdirs, **kwargs)

    def glob(self, path: Any, maxdepth: int | None = None, **kwargs: Any) -> Any:
        """Return the paths that match a pattern."""
        return super().glob(url.text(path), maxdepth=maxdepth, **kwargs)

    def du(self, path: Any, total: bool = True, maxdepth: int | None = None, **kwargs: Any) -> Any:
        """Return the bytes of all files below ``path``."""
        return super().du(path, total=total, maxdepth=maxdepth, **kwargs)

    def expand_path(self, path: Any, recursive: bool = False, maxdepth: int | None = None, **kwargs: Any) -> Any:
        """Return the paths that match ``path``: a pattern, a folder, or a list of both.

        What looks like a pattern, matches nothing, and is there, is a name, as in a shell.
        """
        given = list(path) if isinstance(path, (list, tuple, set)) else [path]
        names = [self._strip_protocol(one) for one in given]
        literal = []
        if not kwargs.get("assume_literal"):
            literal = [name for name in names if has_magic(name) and self.exists(name) and not self.glob(name)]
        if not literal:
            return super().expand_path(path, recursive=recursive, maxdepth=maxdepth, **kwargs)
        found = set(super().expand_path(literal, recursive, maxdepth, assume_literal=True, **kwargs))
        others = [one for one, name in zip(given, names, strict=True) if name not in literal]
        if others:
            found |= set(super().expand_path(others, recursive=recursive, maxdepth=maxdepth, **kwargs))
        return sorted(found)

    def cat(self, path: Any, recursive: bool = False, on_error: str = "raise", **kwargs: Any) -> Any:
        """Return the bytes of one file, or a dict of many."""
        return super().cat(path, recursive=recursive, on_error=on_error, **kwargs)

    # Bytes.

    def open(
        self,
        path: Any,
        mode: str = "rb",
        block_size: int | None = None,
        cache_options: Mapping[str, Any] | None = None,
        compression: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Open a file.

        Args:
            path: taken by the letter.
            mode: ``r``, ``w``, ``x``, ``a``, with ``+`` and ``b`` or ``t`` as of :func:`open`. ``w`` and ``x`` show
                nothing under the name before the close; a ``with`` block that ends by an exception leaves the old
                file. ``a`` and ``r+`` change the file in place.
            block_size: bytes of a block of the cache, or of the buffer for writing.
            cache_options: as of the cache of fsspec.
            compression: name of a codec of fsspec, or ``infer``.
            kwargs: ``cache_type``; ``autocommit``, ``fsync`` and ``permissions`` for writing; ``encoding``,
                ``errors`` and ``newline`` for text.
        """
        text = {name: kwargs.pop(name) for name in ("encoding", "errors", "newline") if name in kwargs}
        is_text = "b" not in mode
        binary = mode.replace("t", "") + "b" if is_text else mode
        name = self._strip_protocol(path)
        autocommit = kwargs.pop("autocommit", not self._intrans)
        file: Any = self._open(name, binary, block_size, autocommit, cache_options, **kwargs)
        # fsspec's own rule of what belongs to a transaction.
        if not autocommit and "r" not in binary:
            self.transaction.files.append(file)
        if compression is not None:
            file = closing_both(file, compression, name, binary)
        return TextFile(file, **text) if is_text else file

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,
        cache_options: Mapping[str, Any] | None = None,
        cache_type: str | None = None,
        **kwargs: Any,
    ) -> StorageFile | WriterFile:
        # fsspec's reference:// comes here with whole URLs.
        path = self._strip_protocol(path)
        if block_size is None or str(block_size) == "default":
            block_size = self.block_size
        if mode == "rb":
            return StorageFile(self, path, mode, block_size, cache_type or self.cache_type, cache_options)
        writing = write_mode(mode)
        self._writing("open for writing", path)
        if writing[0] != "r":
            self._make_parent(path)
        # What is changed in place ("r+") belongs to no transaction of fsspec.
        return WriterFile(
            self,
            path,
            writing,
            autocommit=autocommit or writing[0] == "r",
            block_size=block_size,
            fsync=kwargs.get("fsync", self.fsync),
            permissions=kwargs.get("permissions"),
        )

    def cat_file(self, path: Any, start: Any = None, end: Any = None, **kwargs: Any) -> bytes:
        """Return ``data[start:end]`` of a file, with Python's slice rules for all integers and ``None``."""
        handle = open_handle(self.backend, self._strip_protocol(path))
        try:
            low, high = resolve_range(start, end, handle.nbytes)
            return read_bytes(self.backend, handle, low, high)[0]
        finally:
            handle.close()

    def cat_ranges(
        self,
        paths: list[Any],
        starts: Any,
        ends: Any,
        max_gap: int | None = None,
        on_error: str = "return",
        **kwargs: Any,
    ) -> list[Any]:
        """Return ``data[start:end]`` of each path, in the order given.

        Each file is opened once, and ranges that add up to 1 MiB or more move in one transfer.

        Args:
            paths: list of paths; a path may stand many times.
            starts: as of :meth:`cat_file`; a single one holds for all paths.
            ends: as ``starts``.
            max_gap: accepted and of no effect: nothing is gained by reading what lies between ranges.
            on_error: ``return`` puts exceptions in the list, ``raise`` raises the first.
            kwargs: ignored, as callers of fsspec pass options of other file systems.

        Raises:
            ValueError: lists of different lengths, or an unknown ``on_error``.
            TypeError: ``paths`` is no list, or a bound is no integer.
        """
        names, bounds = self._ranges(paths, starts, ends)
        return cat_many(self.backend, names, bounds, on_error)

    def _ranges(self, paths: Any, starts: Any, ends: Any) -> tuple[list[str], list[Bounds]]:
        """Return stripped paths and bounds of the same length."""
        if not isinstance(paths, (list, tuple)):
            raise TypeError(f"paths must be a list, not {type(paths).__name__}")
        lists = []
        for word, bound in (("starts", starts), ("ends", ends)):
            values = list(bound) if isinstance(bound, Iterable) else [bound] * len(paths)
            if len(values) != len(paths):
                raise ValueError(f"{len(values)} {word} for {len(paths)} paths")
            for value in values:
                resolve_range(value, None, 0)  # raises TypeError for what is no index
            lists.append(values)
        return [self._strip_protocol(path) for path in paths], list(zip(*lists, strict=True))

    def readinto_ranges(
        self,
        paths: list[Any],
        starts: Any,
        ends: Any,
        arrays: Sequence[Any],
        *,
        stream: Any = None,
        require: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> ReadReport:
        """Fill each array with ``data[start:end]`` of its path.

        Everything is checked before the first byte moves. On an error the content of all arrays is undefined.

        Args:
            paths: list of paths; a path may stand many times and is opened once.
            starts: as of :meth:`cat_file`; a single one holds for all paths.
            ends: as ``starts``.
            arrays: one a range, exactly of its size; host and GPU arrays may be mixed. See
                :func:`xds.arrays.destination`. No two may overlap.
            stream: CUDA stream that orders the reads into GPU arrays.
            require: ``{"posting": ..., "placement": ...}``: raise instead of reading another way; the file system's
                option if ``None``.
            timeout_s: longest time without progress; the file system's option if ``None``.

        Returns:
            One report over all ranges.

        Raises:
            ArrayError: an array that cannot be filled, has another size than its range, or overlaps another.
            ValueError: lists of different lengths.
            FileChangedError: a file moved while it was read.
            RequirementError: ``require`` cannot be met.
        """
        names, bounds = self._ranges(paths, starts, ends)
        require, timeout_s = self.transfer_options(require, timeout_s)
        return readinto_many(self.backend, names, bounds, arrays, stream=stream, require=require, timeout_s=timeout_s)


class XdsFileSystem(StorageFileSystem):
    """Files, folders and block devices of this machine: ``xds:///path``."""

    protocol = "xds"
    root_marker = "/"
