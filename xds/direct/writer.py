"""Writers of local files: a file without a name, or with a hidden one, until the commit. Layer: backends.

A file that is replaced keeps permission bits and, where this process may, its owner. Other hard links to it keep the
old bytes: the name leads to a new file.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from xds.direct.backend import Descriptor, OpenWhile, check_require, check_type
from xds.errors import XdsError

if TYPE_CHECKING:
    from xds.backend import Fsync, Transfer, WriteMode

_FLAGS = os.O_CLOEXEC | os.O_NONBLOCK
_PIECE_NBYTES = 1 << 20
_RENAME_NOREPLACE = 1  # linux/fs.h
#: File systems say in one of these that they have no files without a name, or no hard links.
_CANNOT = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT, errno.EPERM, errno.ENOSYS, errno.EMLINK)


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Let errors name the file that the caller gave, not the hidden one."""
    try:
        yield
    except XdsError:
        raise
    except OSError as error:
        if error.errno is None or error.filename == path:
            raise
        raise OSError(error.errno, error.strerror, path) from error


def create(path: str, mode: WriteMode, permissions: int | None = None, deferred: bool = False) -> _LocalWriter:
    """Open ``path`` for writing; see :meth:`xds.backend.WritingBackend.create`."""
    if mode not in ("wb", "xb", "ab", "w+b", "x+b", "a+b", "r+b"):
        raise ValueError(f"mode {mode!r}: must be wb, xb, ab, r+b, or one of the first three with a +")
    with naming(path):
        try:
            status = os.stat(path)  # noqa: PTH116 (text)
        except FileNotFoundError:
            status = None
        if status is not None:
            if mode[0] == "x":
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            check_type(status, path)
        elif mode[0] == "x" and os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        bits = 0o666 if permissions is None else permissions
        in_place = mode[0] == "r" or (mode[0] == "a" and not deferred)
        if in_place or (status is not None and stat.S_ISBLK(status.st_mode)):
            return _InPlace(path, mode, bits)
        return _Staged(path, mode, bits, status)


class _LocalWriter:
    """What both kinds share: one descriptor, gone after commit or discard."""

    path: str
    nbytes: int
    _descriptor: Descriptor | None

    def _number(self) -> int:
        return _LocalWriter.descriptor(self).number

    def pwrite(self, view: memoryview, offset: int) -> None:
        number, done = self._number(), 0
        with naming(self.path):
            while done < len(view):
                done += os.pwrite(number, view[done:] if done else view, offset + done)

    def pread_into(self, view: memoryview, offset: int) -> int:
        number, done = self._number(), 0
        with naming(self.path):
            while done < len(view):
                count = os.preadv(number, (view[done:],), offset + done)
                if count == 0:
                    break
                done += count
        return done

    def truncate(self, nbytes: int) -> None:
        with naming(self.path):
            os.ftruncate(self._number(), nbytes)

    def transfer_out(
        self,
        *,
        device: int | None = None,
        require: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> Transfer:
        check_require(require, device=device, doing="writes")
        # Loads the native core: small writes never need it.
        from xds.engine.mover import MoverTransfer

        descriptor = self.descriptor()
        transfer = MoverTransfer(
            [descriptor.number],
            [self.path],
            device=device,
            timeout_s=timeout_s,
            require_dma=(require or {}).get("placement") == "dma",
            direction="out",
        )
        return OpenWhile(transfer, [descriptor])

    def descriptor(self) -> Descriptor:
        """Return a descriptor that takes bytes at any offset; open while the caller holds it."""
        if self._descriptor is None:
            raise ValueError(f"{self.path}: I/O operation on closed file")
        return self._descriptor

    def _sync(self, fsync: Fsync) -> None:
        if fsync == "data":
            os.fdatasync(self._number())
        elif fsync == "full":
            os.fsync(self._number())

    def __del__(self) -> None:
        self.discard()

    def commit(self, *, fsync: Fsync = "none") -> None:
        raise NotImplementedError

    def discard(self) -> None:
        raise NotImplementedError


class _InPlace(_LocalWriter):
    """Appends, changes of what is there, block devices: every write is seen at once."""

    def __init__(self, path: str, mode: WriteMode, bits: int) -> None:
        self._descriptor = None
        self.path = path
        self._appends = mode[0] == "a"
        flags = os.O_RDWR if "+" in mode else os.O_WRONLY
        if mode[0] != "r":
            flags |= os.O_CREAT
        if self._appends:
            flags |= os.O_APPEND
        self._descriptor = Descriptor(os.open(path, flags | _FLAGS, bits))
        status = os.fstat(self._descriptor.number)
        check_type(status, path)
        self._is_device = stat.S_ISBLK(status.st_mode)
        # As for reads: O_NONBLOCK was needed only in case of a FIFO.
        os.set_blocking(self._descriptor.number, True)
        end = os.lseek(self._descriptor.number, 0, os.SEEK_END)
        self.nbytes = 0 if mode[0] == "w" else end

    def pwrite(self, view: memoryview, offset: int) -> None:
        if not self._appends:
            super().pwrite(view, offset)
            return
        number, done = self._number(), 0
        with naming(self.path):
            while done < len(view):
                done += os.write(number, view[done:] if done else view)

    def descriptor(self) -> Descriptor:
        if not self._appends and not self._is_device:
            return super().descriptor()
        # A transfer reads as well. With O_APPEND the kernel ignores offsets, and the pieces come in any order.
        with naming(self.path):
            return Descriptor(os.open(f"/proc/self/fd/{self._number()}", os.O_RDWR | os.O_CLOEXEC))

    def truncate(self, nbytes: int) -> None:
        if not self._is_device:
            super().truncate(nbytes)

    def commit(self, *, fsync: Fsync = "none") -> None:
        if self._descriptor is not None:
            try:
                with naming(self.path):
                    self._sync(fsync)
            finally:
                self._descriptor = None

    def discard(self) -> None:
        self._descriptor = None


class _Staged(_LocalWriter):
    """A new file in the folder of the old, which the commit puts in its place.

    It has no name at all where the file system can do that, so that nothing is left even if the process is killed;
    else it is ``.{name}.xds-{random}``.
    """

    def __init__(self, path: str, mode: WriteMode, bits: int, old: os.stat_result | None) -> None:
        self._descriptor = None
        self._temporary: str | None = None
        self.path = path
        self._mode = mode[0]
        self._bits = bits
        # Through a link, as open() writes; also through one that leads nowhere yet.
        self._target = os.path.realpath(path) if os.path.islink(path) else path  # noqa: PTH114 (text)
        self._folder, name = os.path.split(self._target)
        # The name of the temporary one must fit too (NAME_MAX is 255 bytes).
        self._stem = os.fsdecode(os.fsencode(name)[:200])
        self.nbytes = 0
        if old is not None:
            if not os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            if self._mode == "a":
                self.nbytes = old.st_size
        if self._mode == "a" and "+" in mode:
            raise XdsError(f"{path}: a transaction appends only; open with mode ab", errno=errno.EINVAL, filename=path)
        self._open(0o600 if old is not None else bits)
        if old is not None and self._mode == "w":
            number = self._number()
            with contextlib.suppress(PermissionError):
                os.fchown(number, old.st_uid, old.st_gid)
            os.fchmod(number, stat.S_IMODE(old.st_mode))

    def _open(self, bits: int) -> None:
        try:
            number = os.open(self._folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, bits)
        except OSError as error:
            if error.errno not in _CANNOT:
                raise
            temporary = self._new_name()
            number = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, bits)
            self._temporary = temporary
        self._descriptor = Descriptor(number)

    def _new_name(self) -> str:
        return os.path.join(self._folder, f".{self._stem}.xds-{secrets.token_hex(8)}")

    def commit(self, *, fsync: Fsync = "none") -> None:
        if self._descriptor is None:
            return
        try:
            with naming(self.path):
                if self._mode == "a":
                    self._append(fsync)
                else:
                    self._sync(fsync)
                    if self._mode == "x":
                        self._link_new()
                    else:
                        self._replace()
                if fsync == "full":
                    _sync_folder(self._folder)
        finally:
            self.discard()

    def _replace(self) -> None:
        if self._temporary is None:
            temporary = self._new_name()
            self._link(temporary)
            self._temporary = temporary
        os.rename(self._temporary, self._target)  # noqa: PTH104 (text)
        self._temporary = None

    def _link_new(self) -> None:
        """Take the name only if nobody has it."""
        if self._temporary is None:
            self._link(self._target)
            return
        try:
            os.link(self._temporary, self._target)
        except OSError as error:
            if error.errno not in _CANNOT or not os.path.exists(self._temporary):
                raise
            rename_new(self._temporary, self._target)
            self._temporary = None

    def _link(self, name: str) -> None:
        # A directory descriptor, of no meaning for absolute names, makes Python take linkat, which follows the link.
        os.link(f"/proc/self/fd/{self._number()}", name, src_dir_fd=0, follow_symlinks=True)

    def _append(self, fsync: Fsync) -> None:
        """Append what was staged behind :attr:`nbytes`; if that fails, cut the file back to what it was."""
        source = self._number()
        begin, end = self.nbytes, os.fstat(source).st_size
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        target = Descriptor(os.open(self._target, flags, self._bits))
        before = os.fstat(target.number).st_size
        try:
            while begin < end:
                piece = os.pread(source, min(_PIECE_NBYTES, end - begin), begin)
                view = memoryview(piece)
                while view:
                    view = view[os.write(target.number, view) :]
                begin += len(piece)
            if fsync == "data":
                os.fdatasync(target.number)
            elif fsync == "full":
                os.fsync(target.number)
        except BaseException:
            os.ftruncate(target.number, before)
            raise

    def discard(self) -> None:
        temporary, self._temporary = getattr(self, "_temporary", None), None
        self._descriptor = None
        if temporary is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)  # noqa: PTH108 (text)


def _sync_folder(path: str) -> None:
    folder = Descriptor(os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    os.fsync(folder.number)


def rename_new(old: str, new: str) -> None:
    """Rename only if nothing has the new name (``renameat2`` with ``RENAME_NOREPLACE``)."""
    libc = ctypes.CDLL(None, use_errno=True)
    at_cwd = -100  # AT_FDCWD, fcntl.h
    if libc.renameat2(at_cwd, os.fsencode(old), at_cwd, os.fsencode(new), ctypes.c_uint(_RENAME_NOREPLACE)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), new)
