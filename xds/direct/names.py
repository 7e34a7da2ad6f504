"""Names of local files and folders: make, remove, rename, copy, touch. Layer: backends."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import stat
from typing import TYPE_CHECKING

from xds.direct.writer import create, naming, rename_new
from xds.interrupt import checkpoint

if TYPE_CHECKING:
    from xds.direct.backend import LocalHandle

_FICLONE = 0x40049409  # linux/fs.h
_PIECE_NBYTES = 64 << 20
#: The kernel cannot copy between these two files by itself.
_BY_HAND = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM)


def copy(source: LocalHandle, new: str) -> None:
    """Make ``new`` a file of the bytes of ``source``: a shared extent where the file system can, else a copy.

    Raises:
        shutil.SameFileError: both are the same file.
        FileChangedError: the source was written to meanwhile; ``new`` is what it was.
    """
    try:
        there = os.stat(new)  # noqa: PTH116 (text)
    except OSError:
        there = None  # opening it says why
    if there is not None and (there.st_dev, there.st_ino) == source.identity[:2]:
        raise shutil.SameFileError(errno.EINVAL, "source and target are the same file", source.path, None, new)
    writer = create(new, "wb")
    try:
        from_file, to_file = source.descriptor(), writer.descriptor()  # open while held
        with naming(new):
            _copy_bytes(from_file.number, to_file.number, source.nbytes)
        source.check_unchanged()
        writer.commit()
    finally:
        writer.discard()


def _copy_bytes(source: int, target: int, nbytes: int) -> None:
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError:
        pass  # not on this file system: the bytes are copied
    else:
        return
    done, by_kernel = 0, True
    while done < nbytes:
        checkpoint()
        count = min(_PIECE_NBYTES, nbytes - done)
        if by_kernel:
            try:
                count = os.copy_file_range(source, target, count, done, done)
            except OSError as error:
                if error.errno not in _BY_HAND:
                    raise
                by_kernel = False
                continue
            if count == 0 and done == 0:
                by_kernel = False  # some special file systems say 0 for files that have bytes
                continue
        else:
            piece = memoryview(os.pread(source, min(count, 4 << 20), done))
            count, written = len(piece), 0
            while written < count:
                written += os.pwrite(target, piece[written:], done + written)
        if count == 0:
            return  # shorter than it was: the check that follows says so
        done += count


def rename(old: str, new: str, *, replace: bool = True) -> None:
    """Rename; between file systems, copy beside the new name, rename there, and remove the old."""
    try:
        if replace:
            os.rename(old, new)  # noqa: PTH104 (text)
        else:
            rename_new(old, new)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        _move_over(old, new, replace=replace)


def _move_over(old: str, new: str, *, replace: bool) -> None:
    folder, name = os.path.split(new)
    temporary = os.path.join(folder, f".{os.fsdecode(os.fsencode(name)[:200])}.xds-{secrets.token_hex(8)}")
    is_folder = stat.S_ISDIR(os.lstat(old).st_mode)
    try:
        if is_folder:
            shutil.copytree(old, temporary, symlinks=True, copy_function=_copy_with_checkpoint)
        else:
            _copy_with_checkpoint(old, temporary)
        if replace:
            os.rename(temporary, new)  # noqa: PTH104 (text)
        else:
            rename_new(temporary, new)
    except BaseException:
        if os.path.lexists(temporary):
            if is_folder:
                shutil.rmtree(temporary, ignore_errors=True)
            else:
                os.unlink(temporary)  # noqa: PTH108 (text)
        raise
    if is_folder:
        shutil.rmtree(old)
    else:
        os.unlink(old)  # noqa: PTH108 (text)


def _copy_with_checkpoint(old: str, new: str) -> str:
    checkpoint()
    return shutil.copy2(old, new, follow_symlinks=False)


def rmtree(path: str) -> None:
    """Remove a folder and all in it.

    Raises:
        ValueError: it is the current folder of this process.
    """
    if os.path.abspath(path) == os.getcwd():  # noqa: PTH100, PTH109 (text)
        raise ValueError("Cannot delete current working directory")
    shutil.rmtree(path)


def touch(path: str, *, truncate: bool) -> None:
    """Make an empty file, or set the times of what is there; ``truncate`` empties it."""
    if os.path.exists(path):
        os.utime(path, None)
        if truncate:
            os.truncate(path, 0)
    else:
        create(path, "ab").commit()
