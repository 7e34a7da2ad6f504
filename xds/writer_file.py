"""Files open for writing: Python's file object plus writes from arrays. Layer: file system; knows no backend."""

from __future__ import annotations

import io
import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from xds.arrays import Destination, source
from xds.backend import Transfer, WriteMode
from xds.bytes_writer import BytesWriter
from xds.errors import ArrayError, RangeError
from xds.futures import TransferFuture
from xds.reads import begin_one, view_of
from xds.report import ReadReport

if TYPE_CHECKING:
    from xds.backend import Writer


class WriterFile(BytesWriter):
    """A file open for writing (see :class:`xds.bytes_writer.BytesWriter`) that takes arrays of the GPU too."""

    def writefrom(
        self,
        array: Any,
        *,
        stream: Any = None,
        require: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Write all bytes of ``array`` at the position; return how many.

        Args:
            array: C-contiguous: NumPy, CuPy, torch, JAX, DLPack, ``__cuda_array_interface__``, or any buffer.
            stream: CUDA stream behind which the array's memory is read (see :func:`xds.arrays.destination`).
            require: ``{"posting": ..., "placement": ...}``: raise instead of writing another way; the file system's
                option if ``None``.
            timeout_s: longest time without progress; the file system's option if ``None``.

        Raises:
            ArrayError: the array's memory cannot be read as bytes.
            RequirementError: ``require`` cannot be met; nothing was written.
        """
        writer = self._open_writer()
        require, timeout_s = self.fs.transfer_options(require, timeout_s)
        memory = source(array, stream=stream)
        self.flush()
        if self.mode[0] == "a":
            self.loc = self._end
        if memory.device is None and not require:
            self._put(writer, view_of(memory, memory.nbytes))
            return memory.nbytes
        transfer = self._transfer(writer, memory.device, self.loc + memory.nbytes, require, timeout_s)
        with self._failing(counted=True), self._span(memory.nbytes) as span, transfer:
            begin_one(transfer, memory, self.loc, memory.nbytes)
            self.report = span.report = transfer.wait()
        self.loc += memory.nbytes
        return memory.nbytes

    def _transfer(
        self, writer: Writer, device: int | None, end: int, require: Mapping[str, str] | None, timeout_s: float
    ) -> Transfer:
        transfer = writer.transfer_out(device=device, require=require, timeout_s=timeout_s)
        if end > self._end:
            try:
                with self._failing():
                    writer.truncate(end)
            except BaseException:
                transfer.cancel()
                raise
            self._end = end
        return transfer

    def pwrite(
        self,
        array: Any,
        nbytes: int | None = None,
        offset: int = 0,
        *,
        stream: Any = None,
        require: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> TransferFuture:
        """Begin to write the first bytes of ``array`` at ``offset``; the position of the file stays.

        Args:
            array: as of :meth:`writefrom`; held, and not to be changed, until the write has ended.
            nbytes: how many; the size of the array if ``None``.
            offset: in the file, bytes.
            stream: as of :meth:`writefrom`.
            require: as of :meth:`writefrom`.
            timeout_s: as of :meth:`writefrom`.

        Returns:
            A future; writes from host memory are done when it is returned. Closing the file waits for it.
        """
        writer = self._open_writer()
        if self.mode[0] == "a":
            raise io.UnsupportedOperation("pwrite: a file opened with mode a is written at its end; use writefrom")
        require, timeout_s = self.fs.transfer_options(require, timeout_s)
        memory = source(array, stream=stream)
        offset = operator.index(offset)
        wanted = memory.nbytes if nbytes is None else operator.index(nbytes)
        if offset < 0 or wanted < 0:
            raise RangeError(f"{self.path}: pwrite of {wanted} bytes at offset {offset}: neither may be negative")
        if wanted > memory.nbytes:
            raise ArrayError(f"{self.path}: pwrite of {wanted} bytes from an array of {memory.nbytes} bytes")
        self.flush()
        if memory.device is None and not require:
            self._put_at(writer, view_of(memory, wanted), offset)
            future = TransferFuture(self.path, None, wanted, report=self.report)
        else:
            future = self._begin(writer, memory, wanted, offset, require, timeout_s)
        if wanted:
            self._end = max(self._end, offset + wanted)
        return future

    def _begin(
        self,
        writer: Writer,
        memory: Destination,
        nbytes: int,
        offset: int,
        require: Mapping[str, str] | None,
        timeout_s: float,
    ) -> TransferFuture:
        transfer = self._transfer(writer, memory.device, offset + nbytes if nbytes else 0, require, timeout_s)
        try:
            begin_one(transfer, memory, offset, nbytes)
        except BaseException:
            transfer.cancel()
            raise

        def finish(transfer: Transfer) -> ReadReport:
            with self._failing(counted=True):
                self.report = transfer.wait()
            return self.report

        future = TransferFuture(self.path, transfer, nbytes, finish=finish, keepalive=memory, operation="write")
        self._futures = [other for other in self._futures if not other.done()] + [future]
        return future


def write_mode(mode: str) -> WriteMode:
    """Return the one spelling of a mode for writing.

    Raises:
        ValueError: no such mode.
    """
    letters = mode.replace("b", "").replace("t", "")
    first, plus = letters[:1], "+" if "+" in letters else ""
    if sorted(letters) != sorted(first + plus) or first not in "rwxa" or (first == "r" and not plus) or not first:
        raise ValueError(f"mode {mode!r}: must be one of rb, wb, xb, ab, r+b, w+b, x+b, a+b")
    return cast("WriteMode", f"{first}{plus}b")
