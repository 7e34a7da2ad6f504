"""Open files: Python's file object plus reads into arrays. Layer: file system; knows no backend by name."""

from __future__ import annotations

import io
import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, SupportsIndex

from fsspec.core import caches

from xds.arrays import destination
from xds.errors import ArrayError, RangeError
from xds.futures import TransferFuture
from xds.reads import begin_one, host_view, is_small, open_handle, read_bytes, read_into, unchanged

if TYPE_CHECKING:
    from xds.backend import Backend, Handle, Transfer
    from xds.filesystem import StorageFileSystem
    from xds.report import ReadReport

#: Block size of the caches of fsspec, where the caller names a cache and no size.
DEFAULT_BLOCK_NBYTES = 256 << 10
#: What :meth:`StorageFile.readline` reads ahead.
LINE_NBYTES = 64 << 10


class StorageFile(io.BufferedIOBase):
    """A file open for reading, with a position, as :func:`open` of mode ``rb`` gives.

    Host reads go straight to the storage (``cache_type="none"``): the kernel's page cache is the cache, and every read
    is checked against a change of the file. A cache of fsspec that the caller names (``readahead``, ``blockcache``,
    ...) serves :meth:`read` and small :meth:`readinto`, and is checked when it fetches. Reads of 1 MiB or more into
    host arrays, and all reads into GPU arrays, go past the cache.

    Attributes:
        size: bytes, as of open.
        report: how the last read of this file travelled, or ``None``.
    """

    _handle: Handle | None = None
    cache: Any = None

    def __init__(
        self,
        fs: StorageFileSystem,
        path: str,
        mode: str = "rb",
        block_size: int | str | None = None,
        cache_type: str = "none",
        cache_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if cache_type not in caches:
            raise ValueError(f"cache_type={cache_type!r}: must be one of {', '.join(sorted(map(str, caches)))}")
        self.fs = fs
        self.path = path
        self.mode = mode
        self.blocksize = DEFAULT_BLOCK_NBYTES if block_size in (None, "default") else operator.index(block_size)  # type: ignore[arg-type]
        self.cache_options = dict(cache_options or {})
        self.kwargs = kwargs
        self.report: ReadReport | None = None
        self._backend: Backend = fs.backend
        self._details: dict[str, Any] | None = None
        self._line_start, self._line = 0, b""
        self.loc = 0
        self._handle = open_handle(self._backend, path)
        self.size = self._handle.nbytes
        self.cache = caches[cache_type](self.blocksize, self._fetch_range, self.size, **self.cache_options)

    @property
    def _cached(self) -> bool:
        # fsspec's blockcache:: puts a cache of its own in place of ours.
        return type(self.cache) is not caches["none"]

    def _open_handle(self) -> Handle:
        if self._handle is None:
            raise ValueError("I/O operation on closed file")
        return self._handle

    def _fetch_range(self, start: int, end: int) -> bytes:
        """Return bytes ``start`` to ``end`` from the storage, fewer at the end of the file (caches ask beyond it)."""
        handle = self._open_handle()
        end = min(end, self.size)
        if start >= end:
            return b""
        data, self.report = read_bytes(self._backend, handle, start, end)
        return data

    # What fsspec expects of a file.

    @property
    def full_name(self) -> str:
        """The URL of the file."""
        url: str = self.fs.unstrip_protocol(self.path)
        return url

    @property
    def details(self) -> dict[str, Any]:
        """As :meth:`info`."""
        if self._details is None:
            self._details = self.fs.info(self.path)
        return self._details

    def info(self) -> dict[str, Any]:
        """Return what the file system says of the path."""
        return self.details

    def __reduce__(self) -> tuple[Any, ...]:
        self._open_handle()
        options = {
            "block_size": self.blocksize,
            "cache_type": self.cache.name or "none",
            "cache_options": self.cache_options,
        }
        return _reopen, (self.fs, self.path, {**self.kwargs, **options}, self.loc)

    def __repr__(self) -> str:
        return f"<StorageFile {self.full_name}>"

    # What Python expects of a file.

    @property
    def closed(self) -> bool:
        """Whether the file was closed."""
        return self._handle is None

    @closed.setter
    def closed(self, value: bool) -> None:
        # fsspec's blockcache:: sets it after its close.
        if value:
            StorageFile.close(self)

    def readable(self) -> bool:
        """Return whether the file is open."""
        return self._handle is not None

    def seekable(self) -> bool:
        """Return whether the file is open."""
        return self._handle is not None

    def fileno(self) -> int:
        """Raise: reads do not go through a descriptor of the caller."""
        raise io.UnsupportedOperation(
            "fileno: the file is read through its storage backend, not by a descriptor; use readinto(array)"
        )

    def tell(self) -> int:
        """Return the position in bytes."""
        self._open_handle()
        return self.loc

    def seek(self, loc: SupportsIndex, whence: int = 0) -> int:
        """Set the position, which may lie beyond the end of the file, and return it."""
        self._open_handle()
        if whence not in (0, 1, 2):
            raise ValueError(f"whence must be 0, 1 or 2, not {whence!r}")
        position = operator.index(loc) + (0, self.loc, self.size)[whence]
        if position < 0:
            raise RangeError(f"{self.path}: seek to {position}, before the start of the file")
        self.loc = position
        return position

    def read(self, length: SupportsIndex | None = -1) -> bytes:
        """Return ``length`` bytes from the position, fewer at the end of the file; all that is left if negative."""
        self._open_handle()
        nbytes = -1 if length is None else operator.index(length)
        end = self.size if nbytes < 0 else min(self.loc + nbytes, self.size)
        if end <= self.loc:
            return b""
        data = self._read_range(self.loc, end)
        self.loc += len(data)
        return data

    def _read_range(self, start: int, end: int) -> bytes:
        return bytes(self.cache._fetch(start, end)) if self._cached else self._fetch_range(start, end)

    def read1(self, length: SupportsIndex | None = -1) -> bytes:
        """As :meth:`read`; without a length, one block."""
        nbytes = -1 if length is None else operator.index(length)
        return self.read(self.blocksize if nbytes < 0 else nbytes)

    def readline(self, size: SupportsIndex | None = -1) -> bytes:
        """Return the bytes up to and including the next newline, ``size`` at most.

        Reads 64 KiB ahead, which stay in the file object for the lines that follow.
        """
        self._open_handle()
        limit = -1 if size is None else operator.index(size)
        stop = self.size if limit < 0 else min(self.loc + limit, self.size)
        parts = []
        while self.loc < stop:
            if not self._line_start <= self.loc < self._line_start + len(self._line):
                self._line = self._read_range(self.loc, min(self.loc + LINE_NBYTES, self.size))
                self._line_start = self.loc
            begin = self.loc - self._line_start
            found = self._line.find(b"\n", begin, stop - self._line_start)
            part = self._line[begin : stop - self._line_start] if found < 0 else self._line[begin : found + 1]
            parts.append(part)
            self.loc += len(part)
            if found >= 0:
                break
        return b"".join(parts)

    def readuntil(self, char: bytes = b"\n", blocks: int | None = None) -> bytes:
        """Return the bytes up to and including ``char``, or to the end of the file (fsspec's name).

        Args:
            char: what to look for, one byte or more.
            blocks: bytes of each look; the block size if ``None``.
        """
        start, found, step = self.loc, -1, blocks or self.blocksize
        parts: list[bytes] = []
        tail = b""
        while found < 0 and (part := self.read(step)):
            parts.append(part)
            # ``char`` may lie across two looks.
            found = (tail + part).find(char)
            if found >= 0:
                found += self.loc - len(part) - len(tail) + len(char) - start
            tail = (tail + part)[-(len(char) - 1) :] if len(char) > 1 else b""
        data = b"".join(parts)
        if found < 0:
            return data
        self.loc = start + found
        return data[:found]

    def close(self) -> None:
        """Close; a second call does nothing. Reads that run in other threads, and futures, come to their end."""
        if self._handle is None:
            return
        try:
            closer = getattr(self.cache, "close", None)
            if callable(closer):
                closer()
        finally:
            self._handle.close()
            self._handle = None
            self._line = b""

    # Reads into arrays.

    def readinto(
        self,
        array: Any,
        *,
        stream: Any = None,
        require: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Fill ``array`` from the position; return bytes read, fewer than its size only at the end of the file.

        Bytes of the array beyond the end of the file stay as they are. On an error the content of the array is
        undefined.

        Args:
            array: C-contiguous and writable: NumPy, CuPy, torch, DLPack, ``__cuda_array_interface__``, or any buffer.
            stream: CUDA stream behind which the read is ordered (see :func:`xds.arrays.destination`).
            require: ``{"posting": ..., "placement": ...}``: raise instead of reading another way; the file system's
                option if ``None``.
            timeout_s: longest time without progress; the file system's option if ``None``.

        Raises:
            ArrayError: the array cannot be filled.
            RequirementError: ``require`` cannot be met; nothing was read.
            FileChangedError: the file moved since it was opened.
        """
        handle = self._open_handle()
        require, timeout_s = self.fs.transfer_options(require, timeout_s)
        target = destination(array, stream=stream)
        nbytes = max(0, min(target.nbytes, self.size - self.loc))
        if self._cached and not require and is_small(target, nbytes) and nbytes:
            host_view(target, nbytes)[:] = self.cache._fetch(self.loc, self.loc + nbytes)
        else:
            self.report = read_into(
                self._backend, handle, target, self.loc, nbytes, require=require, timeout_s=timeout_s
            )
        self.loc += nbytes
        return nbytes

    def readinto1(self, array: Any) -> int:
        """As :meth:`readinto`."""
        return self.readinto(array)

    def pread(
        self,
        array: Any,
        nbytes: int | None = None,
        offset: int = 0,
        *,
        stream: Any = None,
        require: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> TransferFuture:
        """Begin to read at ``offset`` into the first bytes of ``array``; the position of the file stays.

        Args:
            array: as of :meth:`readinto`; held until the read has ended.
            nbytes: how many; the size of the array if ``None``. Fewer arrive at the end of the file.
            offset: in the file, bytes.
            stream: as of :meth:`readinto`.
            require: as of :meth:`readinto`.
            timeout_s: as of :meth:`readinto`.

        Returns:
            A future; small reads into host memory are done when it is returned.
        """
        handle = self._open_handle()
        require, timeout_s = self.fs.transfer_options(require, timeout_s)
        target = destination(array, stream=stream)
        offset = operator.index(offset)
        wanted = target.nbytes if nbytes is None else operator.index(nbytes)
        if offset < 0 or wanted < 0:
            raise RangeError(f"{self.path}: pread of {wanted} bytes at offset {offset}: neither may be negative")
        if wanted > target.nbytes:
            raise ArrayError(f"{self.path}: pread of {wanted} bytes into an array of {target.nbytes} bytes")
        wanted = max(0, min(wanted, self.size - offset))
        if is_small(target, wanted) and not require:
            report = read_into(self._backend, handle, target, offset, wanted)
            self.report = report
            return TransferFuture(self.path, None, wanted, report=report)
        transfer = self._backend.transfer((handle,), device=target.device, require=require, timeout_s=timeout_s)
        try:
            begin_one(transfer, target, offset, wanted)
        except BaseException:
            transfer.cancel()
            raise

        def finish(transfer: Transfer) -> ReadReport:
            with unchanged((handle,)):
                self.report = transfer.wait()
            return self.report

        return TransferFuture(self.path, transfer, wanted, finish=finish, keepalive=target)


def _reopen(fs: StorageFileSystem, path: str, options: dict[str, Any], loc: int) -> StorageFile:
    file: StorageFile = fs.open(path, "rb", **options)
    file.seek(loc)
    return file
