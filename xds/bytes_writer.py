"""Files open for writing: bytes in, a name at the end. Layer: file system; knows no backend by name.

Writes from arrays are in :mod:`xds.writer_file`.
"""

from __future__ import annotations

import contextlib
import io
import operator
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, SupportsIndex

from xds.backend import WriteMode
from xds.errors import RangeError
from xds.futures import TransferFuture
from xds.observe import TRACE, Span
from xds.report import TOTALS, ReadReport

if TYPE_CHECKING:
    from xds.backend import Fsync, Writer
    from xds.filesystem import StorageFileSystem

#: What is gathered before it is written; larger writes go past the buffer.
BUFFER_NBYTES = 256 << 10


class _NoSpan:
    """Where nobody listens."""

    report: Any = None


_NO_SPAN = _NoSpan()


class BytesWriter(io.BufferedIOBase):
    """A file open for writing, with a position, as :func:`open` of modes ``wb``, ``xb``, ``ab``, ``r+b`` gives.

    ``w`` and ``x`` write to a new file, which takes the name when it is closed: until then, and if anything fails,
    what was there stays. Leaving a ``with`` block by an exception discards. ``a`` and ``r+`` change the file in place.

    Attributes:
        report: how the last write from an array travelled, or ``None``.
    """

    _writer: Writer | None = None

    def __init__(
        self,
        fs: StorageFileSystem,
        path: str,
        mode: WriteMode,
        *,
        autocommit: bool = True,
        block_size: int | None = None,
        fsync: Fsync = "none",
        permissions: int | None = None,
    ) -> None:
        self.fs = fs
        self.path = path
        self.mode: str = mode
        self.autocommit = autocommit
        self.blocksize = block_size or BUFFER_NBYTES
        self.report: ReadReport | None = None
        self._fsync = fsync
        self._buffer = bytearray()
        self._futures: list[TransferFuture] = []
        self._failed: BaseException | None = None
        self._closed = False
        backend = fs._writing("open for writing", path)
        with Span("open", path) if TRACE.callbacks else contextlib.nullcontext():
            self._writer = backend.create(path, mode=mode, permissions=permissions, deferred=not autocommit)
        self._end = self._writer.nbytes
        self.loc = self._end if mode[0] == "a" else 0

    def _open_writer(self) -> Writer:
        if self._closed or self._writer is None:
            raise ValueError("I/O operation on closed file")
        return self._writer

    # What fsspec and Python expect of a file.

    @property
    def full_name(self) -> str:
        """The URL of the file."""
        url: str = self.fs.unstrip_protocol(self.path)
        return url

    @property
    def size(self) -> int:
        """Bytes, with what was written so far."""
        return max(self._end, self.loc + len(self._buffer)) if self._buffer else self._end

    def __reduce__(self) -> tuple[Any, ...]:
        raise ValueError(f"{self.path}: a file open for writing cannot be pickled; close it and pickle its path")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.full_name}>"

    @property
    def closed(self) -> bool:
        """Whether the file was closed."""
        return self._closed

    def readable(self) -> bool:
        """Return whether the file was opened with a ``+`` and is open."""
        return "+" in self.mode and not self._closed

    def writable(self) -> bool:
        """Return whether the file is open."""
        return not self._closed

    def seekable(self) -> bool:
        """Return whether the file is open."""
        return not self._closed

    def fileno(self) -> int:
        """Raise: bytes do not go through a descriptor of the caller (option ``fsync`` says what must be on disk)."""
        raise io.UnsupportedOperation("fileno: the file is written through its storage backend, not by a descriptor")

    def tell(self) -> int:
        """Return the position in bytes."""
        self._open_writer()
        return self.loc + len(self._buffer)

    def seek(self, loc: SupportsIndex, whence: int = 0) -> int:
        """Set the position, which may lie beyond the end of the file, and return it."""
        self._open_writer()
        if whence not in (0, 1, 2):
            raise ValueError(f"whence must be 0, 1 or 2, not {whence!r}")
        position = operator.index(loc) + (0, self.tell(), self.size)[whence]
        if position < 0:
            raise RangeError(f"{self.path}: seek to {position}, before the start of the file")
        self.flush()
        self.loc = position
        return position

    def write(self, data: Any) -> int:
        """Write bytes, or any C-contiguous buffer, at the position; return how many."""
        writer = self._open_writer()
        view = memoryview(data)
        if view.nbytes == 0:
            return 0
        if self._failed is not None:
            raise OSError(f"{self.path}: an earlier write failed, so the file will be discarded: {self._failed}")
        view = view.cast("B")
        if self.mode[0] == "a" and not self._buffer:
            self.loc = self._end
        if len(self._buffer) + len(view) <= self.blocksize:
            self._buffer += view
        else:
            self.flush()
            self._put(writer, view)
        return len(view)

    def _put(self, writer: Writer, view: memoryview) -> None:
        self._put_at(writer, view, self.loc)
        self.loc += len(view)
        self._end = max(self._end, self.loc)

    def _put_at(self, writer: Writer, view: memoryview, offset: int) -> None:
        begin = time.perf_counter()
        with self._failing(), self._span(len(view)) as span:
            writer.pwrite(view, offset)
            self.report = span.report = _host_report(len(view), begin)

    def _span(self, nbytes: int) -> Any:
        return Span("write", self.path, nbytes=nbytes) if TRACE.callbacks else contextlib.nullcontext(_NO_SPAN)

    @contextlib.contextmanager
    def _failing(self, *, counted: bool = False) -> Iterator[None]:
        """Remember what failed: the file is never given its name after that. Transfers count their failures."""
        try:
            yield
        except BaseException as error:
            self._failed = error
            if not counted:
                TOTALS.add_error()
            raise

    def flush(self) -> None:
        """Hand what is gathered to the storage; ``w`` and ``x`` still show nothing under the name."""
        if self._buffer and self._failed is None:
            self._put(self._open_writer(), memoryview(bytes(self._buffer)))
            self._buffer.clear()
        elif self._closed:
            raise ValueError("I/O operation on closed file")

    def truncate(self, size: SupportsIndex | None = None) -> int:
        """Cut the file at ``size``, or lengthen it with zeros; at the position if ``None``. The position stays."""
        writer = self._open_writer()
        nbytes = self.tell() if size is None else operator.index(size)
        if nbytes < 0:
            raise ValueError(f"{self.path}: truncate to {nbytes} bytes")
        self.flush()
        with self._failing():
            writer.truncate(nbytes)
        self._end = nbytes
        return nbytes

    def readinto(self, array: Any) -> int:
        """Fill a buffer from the position; return bytes read, fewer than its size only at the end of the file."""
        writer = self._open_writer()
        if not self.readable():
            raise io.UnsupportedOperation("not readable: the file was opened without +")
        self.flush()
        count = writer.pread_into(memoryview(array).cast("B"), self.loc)
        self.loc += count
        return count

    def readinto1(self, array: Any) -> int:
        """As :meth:`readinto`."""
        return self.readinto(array)

    def read(self, length: SupportsIndex | None = -1) -> bytes:
        """Return ``length`` bytes from the position, fewer at the end of the file; all that is left if negative."""
        nbytes = -1 if length is None else operator.index(length)
        left = max(0, self.size - self.tell())
        buffer = bytearray(left if nbytes < 0 else min(nbytes, left))
        return bytes(buffer[: self.readinto(buffer)])

    def read1(self, length: SupportsIndex | None = -1) -> bytes:
        """As :meth:`read`; without a length, one block."""
        nbytes = -1 if length is None else operator.index(length)
        return self.read(self.blocksize if nbytes < 0 else nbytes)

    def readline(self, size: SupportsIndex | None = -1) -> bytes:
        """Return the bytes up to and including the next newline, ``size`` at most."""
        limit = -1 if size is None else operator.index(size)
        start, parts, found = self.tell(), [], False
        while not found and (part := self.read(4096)):
            place = part.find(b"\n") + 1
            found = place > 0
            parts.append(part[:place] if found else part)
        line = b"".join(parts)
        line = line if limit < 0 else line[:limit]
        self.seek(start + len(line))
        return line

    # The end.

    def close(self) -> None:
        """Write what is gathered and, unless the file waits for :meth:`commit`, give it its name.

        A second call does nothing. If a write has failed, the file is discarded.
        """
        if self._closed or self._writer is None:
            self._closed = True
            return
        try:
            if self._failed is None:
                self.flush()
                self._wait()
            if self._failed is not None:
                raise OSError(f"{self.path}: a write failed, so the file was discarded: {self._failed}")
            if self.autocommit:
                self._writer.commit(fsync=self._fsync)
        except BaseException:
            self._writer.discard()
            raise
        finally:
            self._closed = True
            self._buffer.clear()

    def _wait(self) -> None:
        while self._futures:
            with self._failing(counted=True):
                self._futures.pop().get()

    def commit(self) -> None:
        """Give a file that was opened with ``autocommit=False`` its name; closes it first. Transactions call it.

        Raises:
            RuntimeError: the file commits itself.
        """
        if self.autocommit:
            raise RuntimeError(f"{self.path}: commits itself when it is closed; open it with autocommit=False")
        self.close()
        if self._writer is not None:
            self._writer.commit(fsync=self._fsync)

    def discard(self) -> None:
        """Close and let go of what was written; what was under the name stays. After a close, only of deferred files.

        What ``a`` and ``r+`` have changed in place stays changed.
        """
        self._closed = True
        self._buffer.clear()
        for future in self._futures:
            future.cancel()
        self._futures.clear()
        if self._writer is not None:
            self._writer.discard()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is not None:
            self.discard()
        self.close()


def _host_report(nbytes: int, begin: float) -> ReadReport:
    report = ReadReport(
        nbytes,
        {"host": nbytes},
        {"mapped": nbytes},
        {"pwrite": nbytes},
        engine="inline",
        operation="write",
        commands=1,
        threads=1,
        seconds={"total": time.perf_counter() - begin},
    )
    TOTALS.add(report)
    return report
