"""Moves segments of files into arrays and back with the native mover: threads, a small pinned ring, the copy engine.

Layer: engine; above ``xds.native``, below the backends. One mover a process, made when first needed.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Collection, Sequence
from typing import Any, Literal

from xds.engine import cuda
from xds.engine.settings import METHODS, settings
from xds.errors import (
    ArrayError,
    CancelledError,
    DeviceError,
    DeviceMemoryError,
    ForkedProcessError,
    ReadTimeoutError,
    RequirementError,
    ShortReadError,
    XdsError,
)
from xds.native import function
from xds.plan import SEGMENT, Segments
from xds.report import TOTALS, ReadReport

_OK, _PENDING, _SYSTEM, _SHORT_READ, _CUDA, _CANCELED, _END = range(7)
_CUDA_ERROR_OUT_OF_MEMORY = 2
_CUDA_ERROR_NOT_INITIALIZED = 3

# Between two looks of the waiting thread: a signal (Ctrl-C) is seen this soon.
_SLICE_NS = 100_000_000
# How long a failed or cancelled transfer may take to come to rest before its arrays are set aside.
_DRAIN_S = 5.0

_NOTES = {
    1: "io_uring is not allowed here: threads with O_DIRECT instead",
    2: "the file system refused O_DIRECT: read through the page cache",
    4: "network file system: read through the page cache, wide",
    8: "the file system cannot say what is in the page cache (RWF_NOWAIT refused)",
    16: "cold file, and reading through the page cache measured faster than O_DIRECT",
    32: "io_uring without registered buffers (memlock limit)",
    64: "nvidia-fs is loaded, but a test read through cuFile was not real DMA: not used",
}


class _Config(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("threads", "cpu_threads", "slots", "chunk", "forbid", "streams")]


class _Failure(ctypes.Structure):
    _fields_ = [
        ("status", ctypes.c_int32),
        ("code", ctypes.c_int32),
        ("file", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("offset", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
        ("text", ctypes.c_char * 256),
    ]


class _Counters(ctypes.Structure):
    _fields_ = [
        ("landed_nbytes", ctypes.c_uint64),
        ("method_nbytes", ctypes.c_uint64 * len(METHODS)),
        *[
            (name, ctypes.c_uint64)
            for name in (
                "commands",
                "retries",
                "samples",
                "samples_resident",
                "read_ns",
                "copy_ns",
                "setup_ns",
                "threads",
                "pinned_nbytes",
                "notes",
            )
        ],
    ]


class _Native:
    """The C functions, bound once."""

    def __init__(self) -> None:
        pointer, u64, i64, i32 = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int64, ctypes.c_int32
        self.mover_create = function("xds_mover_create", pointer, ctypes.POINTER(_Config))
        self.mover_destroy = function("xds_mover_destroy", None, pointer)
        self.mover_pinned_nbytes = function("xds_mover_pinned_nbytes", u64, pointer)
        self.job_create = function(
            "xds_job_create", pointer, pointer, pointer, ctypes.c_uint32, i32, i32, ctypes.c_uint32
        )
        self.job_add = function("xds_job_add", i64, pointer, pointer, u64, i32, u64, ctypes.POINTER(i32))
        self.job_seal = function("xds_job_seal", None, pointer)
        self.job_wait = function("xds_job_wait", i32, pointer, i64)
        self.job_next_ready = function("xds_job_next_ready", i32, pointer, i64, ctypes.POINTER(u64))
        self.job_event_fd = function("xds_job_event_fd", i32, pointer)
        self.job_cancel = function("xds_job_cancel", None, pointer)
        self.job_drained = function("xds_job_drained", i32, pointer)
        self.job_failure = function("xds_job_failure", None, pointer, ctypes.POINTER(_Failure))
        self.job_counters = function("xds_job_counters", None, pointer, ctypes.POINTER(_Counters))
        self.job_free = function("xds_job_free", None, pointer)


class _Job:
    """A native job, freed when the last one who uses it lets go: another thread may be asking whether it is done."""

    __slots__ = ("_as_parameter_", "_free", "_pid")

    def __init__(self, native: _Native, pointer: int) -> None:
        self._as_parameter_ = ctypes.c_void_p(pointer)
        self._free = native.job_free
        self._pid = os.getpid()

    def __del__(self) -> None:
        # A forked child leaves it alone: the locks inside may be held by threads that are not here.
        if self._pid == os.getpid():
            self._free(self)


class _Process:
    """The mover of this process. A forked child starts without one: the parent's threads are not there."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.native: _Native | None = None
        self.mover: int | None = None
        #: Transfers that would not come to rest: held with their arrays until they do.
        self.abandoned: set[MoverTransfer] = set()

    def after_fork(self) -> None:
        """Forget what belongs to the parent; nothing is freed, its owner lives on there."""
        self.lock = threading.Lock()
        self.mover = None
        self.abandoned = set()

    def new_job(self, fds: Sequence[int], device: int, out: bool, forbid: int) -> tuple[_Native, _Job | None]:
        """Make a job, and the mover if there is none; under the lock, so that no close comes between."""
        with self.lock:
            if self.native is None:
                self.native = _Native()
            if self.mover is None:
                wanted = settings()
                config = _Config(
                    wanted.threads,
                    wanted.cpu_threads,
                    wanted.slots,
                    wanted.chunk_nbytes,
                    sum(1 << METHODS.index(name) for name in wanted.forbid),
                    wanted.streams,
                )
                self.mover = self.native.mover_create(ctypes.byref(config))
                if not self.mover:
                    self.mover = None
                    raise ValueError(f"the mover refused {wanted}")
            array = (ctypes.c_int32 * len(fds))(*fds)
            pointer = self.native.job_create(self.mover, array, len(fds), device, int(out), forbid)
            return self.native, _Job(self.native, pointer) if pointer else None

    def close(self) -> None:
        with self.lock:
            mover, self.mover = self.mover, None
        if mover is not None and self.native is not None:
            self.native.mover_destroy(mover)

    def pinned_nbytes(self) -> int:
        with self.lock:
            if self.mover is None or self.native is None:
                return 0
            return int(self.native.mover_pinned_nbytes(self.mover))


_PROCESS = _Process()
os.register_at_fork(after_in_child=_PROCESS.after_fork)


def close() -> None:
    """Cancel what runs, end the threads, free the ring. A later read makes a new one; a second call does nothing."""
    _PROCESS.close()


# Before the interpreter goes: threads of the mover must not meet a driver that is being torn down.
atexit.register(close)


def pinned_nbytes() -> int:
    """Return the bytes of pinned memory this process holds for staging."""
    return _PROCESS.pinned_nbytes()


class MoverTransfer:
    """Segments of open files on their way into arrays of one device; see :class:`xds.backend.Transfer`.

    Args:
        fds: open descriptors, one a file; they stay the caller's and open until the transfer has drained.
        paths: their names, for messages.
        device: CUDA ordinal, or ``None`` for host arrays.
        timeout_s: seconds without a byte landing after which the transfer fails.
        require_dma: every byte by cuFile with real DMA, or none; reads only.
        direction: ``in``: files to arrays. ``out``: arrays to files, which are open for reading and writing and already
            as long as they will be.
        forbid: methods (of :data:`xds.engine.settings.METHODS`) not to use for this transfer.
        keepalive: held until the transfer has drained.

    Raises:
        RequirementError: ``require_dma``, and it was not proved for one of the files.
        ForkedProcessError: GPU work in a child forked after the parent used the GPU.
        DeviceError: no usable CUDA driver or device.
    """

    def __init__(
        self,
        fds: Sequence[int],
        paths: Sequence[str],
        *,
        device: int | None = None,
        timeout_s: float = 60.0,
        require_dma: bool = False,
        direction: Literal["in", "out"] = "in",
        forbid: Collection[str] = (),
        keepalive: object = None,
    ) -> None:
        if device is not None:
            self._check_device(device)
        if require_dma:
            self._check_dma(fds, paths, device)
        self._paths = tuple(paths)
        self._device = device
        self._timeout_s = timeout_s
        self._keepalive: list[object] = [keepalive]
        self._pid = os.getpid()
        self._begin = time.perf_counter()
        self._counted = False
        self._report: ReadReport | None = None
        self._out = direction == "out"
        refused = [name for name in METHODS if name in forbid or (require_dma and name != "cufile")]
        self._drain_until: float | None = None
        self._job: _Job | None
        self._native, self._job = _PROCESS.new_job(
            fds, -1 if device is None else device, self._out, sum(1 << METHODS.index(name) for name in refused)
        )
        if self._job is None:
            raise DeviceError(f"CUDA device {device} cannot be used: {cuda.device_count()[1]}")

    @staticmethod
    def _check_device(device: int) -> None:
        count, reason = cuda.device_count()
        if count == 0:
            cuda.check_not_forked()
        if not 0 <= device < count:
            raise DeviceError(
                f"CUDA device {device} does not exist: {count} usable" + (f" ({reason})" if reason else "")
            )

    @staticmethod
    def _check_dma(fds: Sequence[int], paths: Sequence[str], device: int | None) -> None:
        for fd, path in zip(fds, paths, strict=True):
            proved, reason = cuda.cufile_proved(fd, device) if device is not None else (False, "host memory")
            if not proved:
                raise RequirementError(
                    f"{path}: require={{'placement': 'dma'}} cannot be met: {reason}. "
                    "See `xds doctor`, or leave the requirement out",
                    filename=path,
                )

    def add(self, segments: Segments, *, stream: int | None = None, keepalive: object = None) -> int:
        """Start to move a batch; see :meth:`xds.backend.Transfer.add`.

        Args:
            segments: contiguous records of :data:`xds.plan.SEGMENT`; ``file`` indexes the transfer's files.
            stream: CUDA stream handle; ``None``: the destinations are free already.
            keepalive: held until the transfer has drained.

        Raises:
            ArrayError: the first destination is not memory of the transfer's device.
            ValueError: a file index or an offset that cannot be.
        """
        job = self._own_job()
        segments = self._checked(segments)
        self._keepalive.append(keepalive)
        code = ctypes.c_int32()
        ordered = self._device is not None and stream is not None
        batch = self._native.job_add(
            job, segments.ctypes.data, len(segments), int(ordered), stream or 0, ctypes.byref(code)
        )
        if batch >= 0:
            return int(batch)
        if -batch == _SYSTEM:
            raise ValueError(f"segments name a file or an offset that cannot be ({len(self._paths)} files)")
        if -batch == _CUDA:
            raise DeviceError(f"CUDA device {self._device}: the event on stream {stream} failed with {code.value}")
        raise self._failure()

    def _checked(self, segments: Segments) -> Segments:
        if segments.dtype != SEGMENT or not segments.flags.c_contiguous or segments.ndim != 1:
            raise ValueError(f"segments must be a contiguous vector of {SEGMENT}, not {segments.dtype}")
        if self._device is not None and len(segments):
            address = int(segments["destination"][0])
            known = cuda.pointer(address)
            if known is None or known.device != self._device or known.managed:
                what = "host memory" if known is None or known.device is None else f"memory of device {known.device}"
                what = "managed memory" if known is not None and known.managed else what
                raise ArrayError(f"destination {address:#x} is {what}, expected memory of CUDA device {self._device}")
        return segments

    def _own_job(self) -> _Job:
        if self._pid != os.getpid():
            raise ForkedProcessError("this transfer was begun by the parent process; begin a new one here")
        job = self._job
        if job is None:
            raise CancelledError("this transfer is over")
        return job

    def seal(self) -> None:
        """Say that no more batches come."""
        if self._job is not None:
            self._native.job_seal(self._own_job())

    def _await(self, call: Any) -> int:
        """Call until the answer is not "pending", or nothing has landed for the time allowed."""
        landed, since = -1, time.monotonic()
        while True:
            # A first, short look: most small reads are over before a signal could matter.
            status = int(call(_SLICE_NS))
            if status != _PENDING:
                return status
            now = time.monotonic()
            progress = self.landed_nbytes
            if progress != landed:
                landed, since = progress, now
            elif now - since >= self._timeout_s:
                raise self._timed_out(landed)

    def _timed_out(self, landed: int) -> ReadTimeoutError:
        drained = self._stop()
        held = "" if drained else "; a request still hangs in the kernel, so its arrays stay allocated until it returns"
        return ReadTimeoutError(
            f"{', '.join(self._paths[:3])}: no byte arrived for {self._timeout_s} s ({landed} bytes had){held}; "
            "see whether the storage answers, or pass a larger timeout_s"
        )

    def next_ready(self) -> int | None:
        """Wait for a batch; see :meth:`xds.backend.Transfer.next_ready`."""
        job = self._own_job()
        batch = ctypes.c_uint64()
        with self._cancel_on_error():
            status = self._await(lambda timeout_ns: self._native.job_next_ready(job, timeout_ns, ctypes.byref(batch)))
            if status == _OK:
                return batch.value
            if status == _END:
                return None
            raise self._failure()

    def wait(self) -> ReadReport:
        """Seal, wait for all, return the report; see :meth:`xds.backend.Transfer.wait`."""
        if self._report is not None:
            return self._report
        job = self._own_job()
        with self._cancel_on_error():
            self._native.job_seal(job)
            status = self._await(lambda timeout_ns: self._native.job_wait(job, timeout_ns))
            if status != _OK:
                raise self._failure()
        self._report = self._make_report(time.perf_counter() - self._begin)
        self._release()
        TOTALS.add(self._report)
        return self._report

    async def wait_async(self) -> ReadReport:
        """As :meth:`wait`, for a coroutine: the loop is told by a descriptor. Cancelling cancels and drains."""
        import asyncio

        if self._report is not None:
            return self._report
        job = self._own_job()
        self._native.job_seal(job)
        fd = self._native.job_event_fd(job)
        if fd < 0:
            raise XdsError(f"no descriptor to wait with: {os.strerror(-fd)}; raise the limit of open files", errno=-fd)
        loop = asyncio.get_running_loop()
        over = asyncio.Event()
        loop.add_reader(fd, over.set)
        landed, since = -1, time.monotonic()
        try:
            while not over.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(over.wait(), min(1.0, self._timeout_s))
                if self.landed_nbytes != landed:
                    landed, since = self.landed_nbytes, time.monotonic()
                elif not over.is_set() and time.monotonic() - since >= self._timeout_s:
                    raise await asyncio.to_thread(self._timed_out, landed)
        except BaseException:
            # In a thread, because a drain waits; shielded, because a second cancellation must not end it.
            await asyncio.shield(asyncio.to_thread(self.cancel))
            raise
        finally:
            loop.remove_reader(fd)
        return self.wait()

    def done(self) -> bool:
        """Whether everything has landed or failed; never blocks."""
        job = self._job
        if job is not None and self._pid != os.getpid():
            self._own_job()  # raises
        return job is None or bool(self._native.job_drained(job))

    def cancel(self) -> None:
        """Stop and drain; see :meth:`xds.backend.Transfer.cancel`."""
        if self._pid == os.getpid():
            self._stop()

    @property
    def landed_nbytes(self) -> int:
        """Bytes that have arrived so far."""
        if self._report is not None:
            return self._report.nbytes
        return self._counters().landed_nbytes if self._job is not None else 0

    @contextlib.contextmanager
    def _cancel_on_error(self) -> Any:
        try:
            yield
        except BaseException:
            # Ctrl-C lands here too: no byte is written into an array after its owner was told of the end.
            self.cancel()
            raise

    def _stop(self) -> bool:
        """Cancel and wait for what is in flight; return whether it came to rest in time."""
        job = self._job
        if job is None:
            return True
        # First of all: if a second Ctrl-C ends the wait, the arrays must stay all the same.
        _PROCESS.abandoned.add(self)
        self._native.job_cancel(job)
        if self._drain_until is None:
            self._drain_until = time.monotonic() + _DRAIN_S
        deadline = self._drain_until
        while not (drained := bool(self._native.job_drained(job))) and time.monotonic() < deadline:
            self._native.job_wait(job, 50_000_000)
        if not self._counted:
            self._counted = True
            TOTALS.add_error()
        if drained:
            self._release()
        return drained

    def _release(self) -> None:
        _PROCESS.abandoned.discard(self)
        self._job = None
        self._keepalive.clear()
        for other in list(_PROCESS.abandoned):
            if other.done():
                _PROCESS.abandoned.discard(other)
                other._job = None
                other._keepalive.clear()

    def _counters(self) -> _Counters:
        counters = _Counters()
        self._native.job_counters(self._own_job(), ctypes.byref(counters))
        return counters

    def _failure(self) -> XdsError:
        failure = _Failure()
        self._native.job_failure(self._own_job(), ctypes.byref(failure))
        path = self._paths[failure.file] if failure.file < len(self._paths) else ""
        where = f"{path}: {failure.nbytes} bytes at offset {failure.offset}"
        if failure.status == _SYSTEM:
            what = "write" if self._out else "read"
            return XdsError(f"{where}: {what} failed: {os.strerror(failure.code)}", errno=failure.code, filename=path)
        if failure.status == _SHORT_READ:
            return ShortReadError(
                f"{where} are missing: the file ends there or earlier; it was longer when it was opened",
                filename=path,
            )
        if failure.status == _CUDA:
            text = f"CUDA device {self._device}: {failure.text.decode(errors='replace')}"
            if failure.code == _CUDA_ERROR_OUT_OF_MEMORY:
                return DeviceMemoryError(f"{text}; the staging ring needs {settings().ring_nbytes} bytes of memory")
            if failure.code == _CUDA_ERROR_NOT_INITIALIZED:
                return ForkedProcessError(f"{text}; was this process forked after its parent used the GPU?")
            return DeviceError(text)
        return CancelledError(
            f"{', '.join(self._paths[:3])}: the read was cancelled; what its arrays hold is undefined"
        )

    def _make_report(self, seconds: float) -> ReadReport:
        counters = self._counters()
        nbytes = counters.landed_nbytes
        names = ("pwrite", *METHODS[1:]) if self._out else METHODS
        method = {name: value for name, value in zip(names, counters.method_nbytes, strict=True) if value}
        real_dma = method.get("cufile", 0)
        placement = "mapped" if self._device is None else "copy"
        placements = {placement: nbytes - real_dma, "dma": real_dma} if real_dma else {placement: nbytes}
        return ReadReport(
            nbytes=nbytes,
            posting={"host": nbytes},
            placement={name: value for name, value in placements.items() if value or not real_dma},
            method=method,
            resident=counters.samples_resident / counters.samples if counters.samples else None,
            engine="mover",
            operation="write" if self._out else "read",
            device=self._device,
            commands=counters.commands,
            retries=counters.retries,
            threads=counters.threads,
            pinned_nbytes=counters.pinned_nbytes,
            seconds={
                "total": seconds,
                "write_threads" if self._out else "read_threads": counters.read_ns / 1e9,
                "copy_threads": counters.copy_ns / 1e9,
                "setup_threads": counters.setup_ns / 1e9,
            },
            notes=tuple(text for bit, text in _NOTES.items() if counters.notes & bit),
        )

    def __enter__(self) -> MoverTransfer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        # Arrays must outlive what still writes them, also where the caller just let go.
        if getattr(self, "_job", None) is not None:
            with contextlib.suppress(Exception):
                self.cancel()
