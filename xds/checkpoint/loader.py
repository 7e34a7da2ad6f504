"""Checkpoints: open, look, load. Layer: checkpoint, over the file system's backend and the frameworks of interop.

Order of events in a load: every header is validated; blocks of memory are allocated and begin to fill at once; arrays
are made while bytes move; the files are checked for change; only then does the caller get the arrays. Whatever goes
wrong, a transfer is cancelled and drained before memory is let go.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from xds.backend import Backend, Handle, Transfer
from xds.checkpoint import index, selection
from xds.checkpoint.layout import BlockPlan, plan_blocks
from xds.checkpoint.locate import locate
from xds.checkpoint.safetensors import DTYPES, MAX_HEADER_NBYTES, Header, read_header
from xds.checkpoint.selection import Names, Table, TensorInfo, distinct
from xds.errors import DeviceMemoryError
from xds.interop import Block, Framework, host, resolve
from xds.interop import framework as find_framework
from xds.observe import TRACE, Span
from xds.report import ReadReport

Progress = Callable[[int, int], object]
Device = str | int | None

_HEADER_THREADS = 8
_THREADS_S = 0.005


class LoadResult(dict[str, Any]):
    """The arrays of a load by name, in file order.

    Attributes:
        report: how the bytes travelled.
        dtypes: the stored type of each tensor by its safetensors name, whatever the array's type is.
        raw: names whose arrays are the stored bytes (1-d uint8), because the framework has no such type.
        metadata: the strings of ``__metadata__`` of the files; where files differ, the first one's.
    """

    __slots__ = ("dtypes", "metadata", "raw", "report")

    def __init__(
        self,
        arrays: Mapping[str, Any],
        *,
        report: ReadReport,
        dtypes: Mapping[str, str],
        raw: frozenset[str],
        metadata: Mapping[str, str],
    ) -> None:
        super().__init__(arrays)
        self.report = report
        self.dtypes = dtypes
        self.raw = raw
        self.metadata = metadata

    def __repr__(self) -> str:
        return f"<LoadResult: {len(self)} tensors, {self.report.nbytes} bytes>"


@dataclass(slots=True)
class _Started:
    """A block whose bytes are on their way."""

    plan: BlockPlan
    block: Block


@dataclass(frozen=True, slots=True)
class _Job:
    """What one load means, after every argument was checked."""

    table: Table
    framework: Framework
    device: int | None
    require: Mapping[str, str] | None
    timeout_s: float

    @property
    def nbytes(self) -> int:
        return int(self.table.nbytes.sum())

    @property
    def files(self) -> list[str]:
        """The paths of the files that hold the tensors."""
        return [self.table.files[number] for number in distinct(self.table.file)]


class Checkpoint:
    """An open checkpoint: everything is known, no tensor is read. Made by :func:`open_checkpoint`.

    Safe for many threads. As a context manager it closes its files; arrays outlive it.

    Attributes:
        metadata: the strings of ``__metadata__`` of the files; where files differ, the first one's.
    """

    def __init__(self, backend: Backend, handles: list[Handle], table: Table, metadata: dict[str, str]) -> None:
        self._backend = backend
        self._handles = handles
        self._table = table
        self._rows: dict[str, int] | None = None
        self._closed = False
        self.metadata = metadata

    def __reduce__(self) -> NoReturn:
        # A copy would close the descriptors of the original.
        raise TypeError("a Checkpoint cannot be copied or pickled: open it again by its URL with xds.open_checkpoint")

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        more = f" and {len(self.files) - 1} more" if len(self.files) > 1 else ""
        closed = ", closed" if self._closed else ""
        where = self.files[0] if self.files else "of no file"
        return f"<Checkpoint {where}{more}: {len(self)} tensors, {self.nbytes} bytes{closed}>"

    def __len__(self) -> int:
        return len(self._table)

    def __contains__(self, name: object) -> bool:
        return name in self._row_of()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors, file after file, in file order."""
        return tuple(self._table.names)

    @property
    def files(self) -> tuple[str, ...]:
        """The paths of the files."""
        return self._table.files

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return int(self._table.nbytes.sum())

    def info(self, name: str) -> TensorInfo:
        """Return type, shape, size and place of a tensor; raises KeyError (TensorNotFoundError)."""
        return self._table.info(selection.find_row(self._row_of(), name))

    def get(
        self,
        name: str,
        *,
        device: Device = None,
        framework: str | None = None,
        require: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> Any:
        """Return one tensor; arguments as in :func:`load`. Raises KeyError (TensorNotFoundError)."""
        loaded = self.load([name], device=device, framework=framework, require=require, timeout_s=timeout_s)
        return loaded[name]

    def load(
        self,
        names: Names = None,
        *,
        device: Device = None,
        framework: str | None = None,
        require: Mapping[str, str] | None = None,
        progress: Progress | None = None,
        timeout_s: float = 60.0,
    ) -> LoadResult:
        """Return the tensors called ``names`` (all; these; or those for which a function of the name is true).

        Arguments and errors as in :func:`load`.
        """
        job = self._job(names, device, framework, require, timeout_s)
        if not TRACE.callbacks:
            return self._load(job, progress)
        with Span("load", *job.files, nbytes=job.nbytes) as span:
            result = self._load(job, progress)
            span.report = result.report
            return result

    def _load(self, job: _Job, progress: Progress | None) -> LoadResult:
        arrays: dict[str, Any] = {}
        with self._transfer(job) as transfer:
            started = _start(job, transfer)
            if job.framework.early:
                for item in started:
                    arrays.update(_arrays(job, item))
            dtypes, raw = _stored_types(job)
            if progress is not None:
                for nbytes in _landed(transfer, started, job):
                    progress(nbytes, job.nbytes)
            report = transfer.wait()
            self._check_unchanged(job.table.file)
        if not job.framework.early:
            for item in started:
                arrays.update(_arrays(job, item))
        return LoadResult(arrays, report=report, dtypes=dtypes, raw=raw, metadata=self.metadata)

    def stream(
        self,
        names: Names = None,
        *,
        device: Device = None,
        framework: str | None = None,
        require: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> Iterator[tuple[str, Any]]:
        """Yield ``(name, array)`` as tensors become ready; each array is the caller's.

        The memory for all of them is allocated when the first one is asked for.
        A file that changes is reported before its next tensor is yielded, and at the end. Leaving the loop early
        stops the reading. Arguments and errors as in :func:`load`; they are checked before the first tensor.
        """
        return self._stream(self._job(names, device, framework, require, timeout_s))

    def _stream(self, job: _Job) -> Iterator[tuple[str, Any]]:
        if not TRACE.callbacks:
            yield from self._tensors(job, None)
            return
        span = Span("load", *job.files, nbytes=job.nbytes)
        try:
            yield from self._tensors(job, span)
        except GeneratorExit:
            span.nbytes = None  # the caller has had enough: how much had landed by then, nobody counts
            span.complete()
            raise
        except BaseException as error:
            span.fail(error)
            raise
        span.complete()

    def _tensors(self, job: _Job, span: Span | None) -> Iterator[tuple[str, Any]]:
        with self._transfer(job) as transfer:
            started = dict(enumerate(_start(job, transfer)))
            while (number := transfer.next_ready()) is not None:
                item = started.pop(number)
                self._check_unchanged(job.table.file[item.plan.first : item.plan.last])
                yield from _arrays(job, item)
                del item
            report = transfer.wait()
            self._check_unchanged(job.table.file)
            if span is not None:
                span.report = report

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        self._closed = True
        for handle in self._handles:
            handle.close()

    def _row_of(self) -> dict[str, int]:
        if self._rows is None:
            self._rows = dict(zip(self._table.names, range(len(self._table)), strict=True))
        return self._rows

    def _job(
        self,
        names: Names,
        device: Device,
        framework: str | None,
        require: Mapping[str, str] | None,
        timeout_s: float,
    ) -> _Job:
        if self._closed:
            raise ValueError("this checkpoint is closed")
        ordinal, framework_name = resolve(device, framework)
        table = selection.choose(self._table, names, self._row_of)
        found = find_framework(framework_name)
        found.check(table.dtype_names())
        return _Job(table, found, ordinal, require, timeout_s)

    def _transfer(self, job: _Job) -> Transfer:
        if job.device is None:
            host.require_available(job.nbytes, f"a load of {len(job.table)} tensors")
        return self._backend.transfer(self._handles, device=job.device, require=job.require, timeout_s=job.timeout_s)

    def _check_unchanged(self, files: npt.NDArray[np.uint32]) -> None:
        for number in distinct(files):
            self._handles[number].check_unchanged()


def _start(job: _Job, transfer: Transfer) -> list[_Started]:
    """Allocate block after block; each begins to fill while the next one is allocated."""
    table, started = job.table, []
    for plan in plan_blocks(table.file, table.offset, table.nbytes):
        try:
            block = job.framework.empty_block(plan.nbytes, job.device)
        except MemoryError as error:
            raise _no_memory(error, job, plan) from error
        transfer.add(plan.segments_at(block.address), stream=block.stream, keepalive=block.keepalive)
        started.append(_Started(plan, block))
    transfer.seal()
    return started


def _no_memory(error: MemoryError, job: _Job, plan: BlockPlan) -> MemoryError:
    first = job.table.names[plan.first]
    tensors = (
        f"tensor {first!r}"
        if plan.last == plan.first + 1
        else f"tensors {first!r} to {job.table.names[plan.last - 1]!r}"
    )
    message = f"{error}; the block is for {tensors} of a load that needs {job.nbytes} bytes in all"
    return DeviceMemoryError(message) if isinstance(error, DeviceMemoryError) else MemoryError(message)


def _arrays(job: _Job, item: _Started) -> list[tuple[str, Any]]:
    plan = item.plan
    places = job.table.places(plan.first, plan.last, plan.offsets)
    return list(zip(job.table.names[plan.first : plan.last], job.framework.views(item.block, places), strict=True))


def _stored_types(job: _Job) -> tuple[dict[str, str], frozenset[str]]:
    """Return the stored type of each tensor, and which of them come raw."""
    table, is_raw = job.table, job.framework.is_raw
    dtypes = dict(zip(table.names, map(DTYPES.__getitem__, table.dtype.tolist()), strict=True))
    # An odd count is the hardest case: a type that is not raw then never is.
    maybe = [code for code in distinct(table.dtype) if is_raw(DTYPES[code], (1,))]
    rows = [row for code in maybe for row in np.flatnonzero(table.dtype == code).tolist()]
    infos = (table.info(row) for row in rows)
    return dtypes, frozenset(info.name for info in infos if is_raw(info.dtype, info.shape))


def _landed(transfer: Transfer, started: list[_Started], job: _Job) -> Iterator[int]:
    done = 0
    yield done
    while (number := transfer.next_ready()) is not None:
        plan = started[number].plan
        done += int(job.table.nbytes[plan.first : plan.last].sum())
        yield done


def open_checkpoint(
    url: str | os.PathLike[str], *, strict: bool = True, max_header_nbytes: int = MAX_HEADER_NBYTES
) -> Checkpoint:
    """Open a checkpoint and validate all of it; no tensor is read.

    Args:
        url: a safetensors file, an index (``*.index.json``) or a folder: a URL of a file system of XDS, a path, or
            ``file://``.
        strict: refuse tensors that a shard has and the index does not name.
        max_header_nbytes: the longest header accepted, bytes of JSON per file.

    Raises:
        UrlError: a URL of a file system that is not one of ours.
        CheckpointError: anything in the files that is not valid; names file, tensor and both numbers.
        TruncatedError: a file that is shorter than its header says.
        OSError: not found, no permission, and so on, as Python's own classes.
    """
    backend, path = locate(url)
    sources = index.find(backend, path)
    handles = index.open_files(backend, sources)
    with contextlib.ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.close)
        headers = _read_headers(handles, max_header_nbytes)
        table = selection.build(headers, index.check_shards(sources, headers, strict=strict))
        metadata: dict[str, str] = {}
        for header in reversed(headers):
            metadata.update(header.metadata)
        stack.pop_all()
        return Checkpoint(backend, handles, table, metadata)


def _read_headers(handles: list[Handle], max_header_nbytes: int) -> list[Header]:
    def read(handle: Handle) -> Header:
        return read_header(handle, max_header_nbytes=max_header_nbytes)

    begin = time.perf_counter()
    first = read(handles[0])
    rest = handles[1:]
    # What is in the page cache is read faster than threads are made.
    if (time.perf_counter() - begin) * len(rest) < _THREADS_S:
        return [first, *map(read, rest)]
    with ThreadPoolExecutor(min(_HEADER_THREADS, len(rest)), "xds-header") as pool:
        futures = [pool.submit(read, handle) for handle in rest]
        # The first file in order is blamed, whichever thread was faster.
        return [first, *(future.result() for future in futures)]


def load(
    url: str | os.PathLike[str],
    *,
    device: Device = None,
    framework: str | None = None,
    require: Mapping[str, str] | None = None,
    names: Names = None,
    strict: bool = True,
    max_header_nbytes: int = MAX_HEADER_NBYTES,
    progress: Progress | None = None,
    timeout_s: float = 60.0,
) -> LoadResult:
    """Load a checkpoint into arrays: validate all of it, then move its bytes, then return name to array.

    Each array begins at a multiple of 256 bytes and belongs to the caller. Types that the framework lacks come as
    1-d uint8 arrays of the stored bytes (``LoadResult.raw``), never silently as another type.

    Args:
        url: as in :func:`open_checkpoint`.
        device: ``None`` (a GPU if there is one, else the host), ``"cpu"``, ``"cuda"``, ``"cuda:1"`` or an ordinal.
        framework: ``"numpy"``, ``"cupy"``, ``"torch"``, ``"jax"``; ``None``: on a GPU torch if it is imported, else
            CuPy; on the host NumPy.
        require: ``{"posting": ..., "placement": ...}`` raises instead of moving the bytes another way.
        names: the tensors wanted: an iterable of names, or a function of the name; ``None`` for all. A name that is
            not there is an error; a function that is true for none gives an empty result.
        strict: as in :func:`open_checkpoint`.
        max_header_nbytes: as in :func:`open_checkpoint`.
        progress: called with (bytes landed, bytes in all), in the calling thread.
        timeout_s: the longest time without any progress, seconds; ``math.inf`` for no limit.

    Raises:
        ArgumentError: a device, framework, ``require`` or ``timeout_s`` that is none, or that do not go together.
        CheckpointError: as in :func:`open_checkpoint`; TensorNotFoundError (a KeyError) for a name that is not there.
        FileChangedError: a file moved while it was read.
        ShortReadError: a file ended early.
        DeviceMemoryError: not enough GPU memory; MemoryError: not enough host memory. Both name the need.
        RequirementError: ``require`` cannot be met.
        ReadTimeoutError: no byte arrived for ``timeout_s``.
        ArrayError: the framework would make another type of a tensor.
    """
    with open_checkpoint(url, strict=strict, max_header_nbytes=max_header_nbytes) as checkpoint:
        return checkpoint.load(
            names, device=device, framework=framework, require=require, progress=progress, timeout_s=timeout_s
        )
