"""Local files and block devices: the backend of ``xds://``. Layer: backends; knows the engine, not the file system."""

from __future__ import annotations

import datetime
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

from xds.errors import ArgumentError, FileChangedError, RequirementError, XdsError

if TYPE_CHECKING:
    from xds.backend import Handle, Transfer, WriteMode, Writer
    from xds.plan import Segments

_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_NOWHERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)

#: What ``require`` may ask for; the values of this backend are checked in :func:`check_require`.
_REQUIRE = {"posting": ("gpu", "host"), "placement": ("mapped", "pull", "copy", "file", "dma")}


class DirectBackend:
    """See :class:`xds.backend.Backend`. Stateless: safe for many threads and after a fork."""

    def info(self, path: str) -> dict[str, Any]:
        """Return the entry of ``path``; links are followed, and one that leads nowhere has the type ``link``."""
        return _entry(path, listing=False)

    def ls(self, path: str) -> list[dict[str, Any]]:
        """Return the entries of a folder, sorted by name; of anything else, its own entry."""
        try:
            names = sorted(os.listdir(path))
        except NotADirectoryError:
            return [self.info(path)]
        entries = []
        for name in names:
            try:
                entries.append(_entry(os.path.join(path, name), listing=True))
            except FileNotFoundError:
                continue  # removed since the folder was read
        return entries

    def open(self, path: str) -> LocalHandle:
        """Open a file or block device for reading.

        Raises:
            IsADirectoryError: a folder.
            XdsError: a FIFO, a socket or a character device; never blocks on one. A file of ``/proc`` and the like,
                which has bytes and a size of 0.
        """
        # Opening a device can have effects of its own (a tape rewinds), so the type is looked at before.
        check_type(os.stat(path), path)  # noqa: PTH116 (microseconds count)
        descriptor = Descriptor(os.open(path, _OPEN_FLAGS))
        status = os.fstat(descriptor.number)
        check_type(status, path)
        if status.st_size == 0 and stat.S_ISREG(status.st_mode):
            _check_empty(descriptor, path)
        # io_uring answers EAGAIN for a descriptor with O_NONBLOCK; it was needed only in case of a FIFO.
        fcntl.fcntl(descriptor.number, fcntl.F_SETFL, 0)
        return LocalHandle(path, descriptor, status)

    def create(self, path: str, *, mode: WriteMode, permissions: int | None = None, deferred: bool = False) -> Writer:
        """Open for writing; see :meth:`xds.backend.WritingBackend.create`."""
        from xds.direct import writer

        return writer.create(path, mode, permissions, deferred)

    def mkdir(self, path: str) -> None:
        """Make one folder."""
        os.mkdir(path)  # noqa: PTH102 (text)

    def rmdir(self, path: str) -> None:
        """Remove an empty folder."""
        os.rmdir(path)  # noqa: PTH106 (text)

    def rmtree(self, path: str) -> None:
        """Remove a folder and all in it; raises ValueError for the current folder of this process."""
        from xds.direct import names

        names.rmtree(path)

    def unlink(self, path: str) -> None:
        """Remove a file or a link."""
        os.unlink(path)  # noqa: PTH108 (text)

    def rename(self, old: str, new: str, *, replace: bool = True) -> None:
        """Rename; between file systems, copy, rename the copy, and remove the old."""
        from xds.direct import names

        names.rename(old, new, replace=replace)

    def copy(self, old: str, new: str) -> None:
        """Copy a file: a shared extent where the file system can, else by the kernel, else by hand."""
        from xds.direct import names

        source = self.open(old)
        try:
            names.copy(source, new)
        finally:
            source.close()

    def touch(self, path: str, *, truncate: bool) -> None:
        """Make an empty file, or set the times of what is there; ``truncate`` empties it."""
        from xds.direct import names

        names.touch(path, truncate=truncate)

    def transfer(
        self,
        handles: Sequence[Handle],
        *,
        device: int | None = None,
        require: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> Transfer:
        """See :meth:`xds.backend.Backend.transfer`. Handles may be closed while it runs.

        Raises:
            ArgumentError: ``require`` holds an unknown key or value; ``timeout_s`` is no positive number.
            RequirementError: ``require`` cannot be met.
        """
        check_require(require, device=device)
        _check_timeout(timeout_s)
        require_dma = (require or {}).get("placement") == "dma"
        # Loads the native core: small reads and listings never need it.
        from xds.engine.mover import MoverTransfer

        local = cast("Sequence[LocalHandle]", handles)
        descriptors = [handle.descriptor() for handle in local]
        transfer = MoverTransfer(
            [descriptor.number for descriptor in descriptors],
            [handle.path for handle in local],
            device=device,
            timeout_s=timeout_s,
            require_dma=require_dma,
        )
        return OpenWhile(transfer, descriptors)


def check_require(require: Mapping[str, str] | None, *, device: int | None, doing: str = "reads") -> None:
    """Raise unless a read by the host into host memory (``device`` ``None``) or GPU memory is what is required.

    ``dma`` into GPU memory depends on the file: the mover proves or refuses it.
    """
    given: Any = require
    if given is not None and not isinstance(given, Mapping):
        raise ArgumentError(f"require={given!r}: must be a dict, as in require={{'posting': 'host'}}")
    have = {"posting": ("host",), "placement": ("mapped",) if device is None else ("copy", "dma")}
    for key, value in (require or {}).items():
        if key not in _REQUIRE:
            raise ArgumentError(f"require={{{key!r}: ...}}: unknown key; known are {', '.join(_REQUIRE)}")
        if value not in _REQUIRE[key]:
            raise ArgumentError(f"require={{{key!r}: {value!r}}}: must be one of {', '.join(_REQUIRE[key])}")
        if value not in have[key]:
            way = "into" if doing == "reads" else "from"
            where = "host memory" if device is None else f"the memory of cuda:{device}"
            raise RequirementError(
                f"require={{{key!r}: {value!r}}} cannot be met: {doing} of xds:// {way} {where} have {key} "
                f"{have[key][0]!r}. Leave the requirement out, or require {key} {have[key][0]!r}"
            )


def _check_timeout(timeout_s: Any) -> None:
    try:
        positive = bool(timeout_s > 0)  # false for NaN
    except TypeError:
        positive = False
    if not positive:
        raise ArgumentError(f"timeout_s={timeout_s!r}: must be a number of seconds above 0; math.inf for no limit")


class Descriptor:
    """An open file descriptor that closes when the last one who uses it lets go.

    A read holds a reference for its duration, so that a close by another thread can neither pull the descriptor away
    nor let its number be reused under the read. No lock: nothing can be left locked in a forked child.
    """

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self, _close: Callable[[int], None] = os.close) -> None:
        _close(self.number)

    def __reduce__(self) -> NoReturn:
        # A copy would be a second owner of the number, and close it again when it is somebody else's.
        raise TypeError("an open file descriptor cannot be copied or pickled: open the file again by its path")


class OpenWhile:
    """A transfer that keeps its descriptors open until it has drained, whoever closes the handles meanwhile."""

    def __init__(self, transfer: Transfer, descriptors: list[Descriptor]) -> None:
        self._transfer = transfer
        self._descriptors = descriptors
        self.seal = transfer.seal
        self.next_ready = transfer.next_ready
        self.wait = transfer.wait
        self.wait_async = transfer.wait_async
        self.done = transfer.done
        self.cancel = transfer.cancel

    def __reduce__(self) -> NoReturn:
        raise TypeError("a transfer cannot be copied or pickled: begin another one")

    def add(self, segments: Segments, *, stream: int | None = None, keepalive: object = None) -> int:
        """See :meth:`xds.backend.Transfer.add`."""
        # Even if this object is dropped, what still runs holds the descriptors.
        return self._transfer.add(segments, stream=stream, keepalive=(keepalive, self._descriptors))

    def __enter__(self) -> Transfer:
        self._transfer.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._transfer.__exit__(*exc)


class LocalHandle:
    """See :class:`xds.backend.Handle`."""

    __slots__ = ("_descriptor", "identity", "nbytes", "path")

    def __init__(self, path: str, descriptor: Descriptor, status: os.stat_result) -> None:
        self.path = path
        self._descriptor: Descriptor | None = descriptor
        self.identity = _identity(status, descriptor.number)
        self.nbytes = self.identity[2]

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self.path}: an open file cannot be copied or pickled: open it again by its path")

    def descriptor(self) -> Descriptor:
        """Return the open descriptor; it stays open while the caller holds the result."""
        descriptor = self._descriptor
        if descriptor is None:
            raise ValueError(f"{self.path}: I/O operation on closed file")
        return descriptor

    def pread_into(self, view: memoryview, offset: int) -> int:
        """Read into ``view`` (bytes, writable) until it is full or the file ends; return bytes read."""
        descriptor = self.descriptor()
        number = descriptor.number
        nbytes = len(view)
        done = os.preadv(number, (view,), offset) if nbytes else 0
        while 0 < done < nbytes:
            count = os.preadv(number, (view[done:],), offset + done)
            if count == 0:
                break
            done += count
        return done

    def check_unchanged(self) -> None:
        """Compare with what the path and the descriptor lead to now; of a closed handle, the path alone.

        Raises:
            FileChangedError: replaced, removed, shrunk, grown or written to; also a change of the inode alone (mode,
                owner, names, times), which a write whose time was put back cannot be told from.
        """
        descriptor = self._descriptor
        number = -1 if descriptor is None else descriptor.number
        # The path first: it says more of a file that was replaced or removed.
        try:
            now = _identity(os.stat(self.path), number)  # noqa: PTH116 (as above)
        except (FileNotFoundError, NotADirectoryError):
            raise self._changed(None) from None
        # Without a descriptor the size of a block device is unknown (-1).
        if now != self.identity and (now[2] >= 0 or now[:2] != self.identity[:2]):
            raise self._changed(now)
        if descriptor is not None:
            now = _identity(os.fstat(number), number)
            if now != self.identity:
                raise self._changed(now)

    def close(self) -> None:
        """Let go of the descriptor: it closes when the reads that run now have ended. A second call does nothing."""
        self._descriptor = None

    def _changed(self, now: tuple[int, ...] | None) -> FileChangedError:
        if now is None:
            what = "it is no longer there"
        elif now[:2] != self.identity[:2]:
            what = f"another file is there now: {_words(now)}"
        elif now[2:4] != self.identity[2:4]:
            what = f"it has changed to {_words(now)}"
        else:
            what = (
                f"size and modification time are the same, and its inode was changed at {_when(now[4])}: by a write "
                "whose time was put back, or by chmod, chown, rename or a hard link"
            )
        return FileChangedError(
            f"{self.path}: the file changed between open and the end of the read. It was {_words(self.identity)}; "
            f"{what}. What was read is not valid: read it again once nobody writes to it",
            filename=self.path,
        )


def _words(identity: tuple[int, ...]) -> str:
    return f"{identity[2]} bytes (inode {identity[1]}, modified {_when(identity[3])})"


def _when(time_ns: int) -> str:
    # Any 64-bit time may stand in an inode; datetime ends at the year 9999.
    try:
        return datetime.datetime.fromtimestamp(time_ns / 1e9, datetime.UTC).isoformat()
    except (OverflowError, ValueError, OSError):
        return f"{time_ns} ns after 1970"


def _identity(status: os.stat_result, number: int) -> tuple[int, ...]:
    """Device, inode, bytes, times of modification and of change (ns).

    The time of change cannot be put back, as that of modification can (``utime``: cp -p, rsync, tar). Bytes of a block
    device come from its open descriptor.
    """
    nbytes = status.st_size
    if stat.S_ISBLK(status.st_mode):
        nbytes = os.lseek(number, 0, os.SEEK_END) if number >= 0 else -1
    return status.st_dev, status.st_ino, nbytes, status.st_mtime_ns, status.st_ctime_ns


def check_type(status: os.stat_result, path: str) -> None:
    """Raise unless it is a regular file or a block device."""
    mode = status.st_mode
    if stat.S_ISREG(mode) or stat.S_ISBLK(mode):
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    kinds = ((stat.S_ISFIFO, "a FIFO"), (stat.S_ISSOCK, "a socket"), (stat.S_ISCHR, "a character device"))
    kind = next((words for test, words in kinds if test(mode)), "no regular file")
    raise XdsError(
        f"{path} is {kind}: it has no size and no offsets to read at. Give a regular file or a block device",
        errno=errno.EINVAL,
        filename=path,
    )


def _check_empty(descriptor: Descriptor, path: str) -> None:
    """Raise for a regular file that has bytes although its size is 0, as those of ``/proc`` do."""
    try:
        empty = not os.pread(descriptor.number, 1, 0) or os.fstat(descriptor.number).st_size > 0
    except OSError:
        empty = False  # /proc/kmsg: nothing to read yet
    if not empty:
        raise XdsError(
            f"{path}: its size is not known to the file system, which says 0 bytes; read it with open()",
            errno=errno.EINVAL,
            filename=path,
        )


def _entry(path: str, *, listing: bool) -> dict[str, Any]:
    status = os.lstat(path)
    entry: dict[str, Any] = {"name": path, "islink": stat.S_ISLNK(status.st_mode)}
    kind = None
    if entry["islink"]:
        entry["destination"] = os.readlink(path)  # noqa: PTH115 (text)
        try:
            status = os.stat(path)  # noqa: PTH116 (text)
        except OSError as error:
            if error.errno in _NOWHERE:
                kind = "link"
            elif listing:
                kind = "other"  # one link into a forbidden folder must not hide its neighbours
            else:
                raise
    size: int | None = status.st_size
    if kind is None:
        kind, size = _kind_and_size(status, path)
    # Linux's stat has no time of birth: "created" is the last change of the inode, as fsspec's own local files have it.
    entry.update(
        size=size,
        type=kind,
        mtime=status.st_mtime,
        created=status.st_ctime,
        mode=status.st_mode,
        ino=status.st_ino,
        nlink=status.st_nlink,
        uid=status.st_uid,
        gid=status.st_gid,
        identity=(status.st_dev, status.st_ino, size, status.st_mtime_ns, status.st_ctime_ns),
    )
    return entry


def _kind_and_size(status: os.stat_result, path: str) -> tuple[str, int | None]:
    mode = status.st_mode
    if stat.S_ISREG(mode):
        return "file", status.st_size
    if stat.S_ISDIR(mode):
        return "directory", status.st_size
    if not stat.S_ISBLK(mode):
        return "other", status.st_size
    try:
        descriptor = Descriptor(os.open(path, _OPEN_FLAGS))
        return "file", os.lseek(descriptor.number, 0, os.SEEK_END)
    except OSError:
        return "file", None  # no permission, or no medium: the size is unknown, the entry is still there
