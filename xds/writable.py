"""All that writes, as fsspec's local files do it. Layer: file system; knows no backend by name.

Differences from :class:`fsspec.implementations.local.LocalFileSystem`, all on purpose: a file appears under its name
when it is complete and not before; what fails leaves the old one; ``put`` and ``get`` make the folders above their
targets, as all remote file systems do, and report their progress.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Mapping
from glob import has_magic
from typing import Any

from fsspec.callbacks import DEFAULT_CALLBACK
from fsspec.implementations.local import LocalFileSystem, trailing_sep
from fsspec.utils import isfilelike, other_paths

from xds.base import BaseFileSystem
from xds.interrupt import checkpoint

_PIECE_NBYTES = 4 << 20
_LOCAL = LocalFileSystem()


def local_path(path: Any) -> str:
    """Return the name of a local file: ``~``, relative names and ``file://`` are understood."""
    name: str = LocalFileSystem._strip_protocol(path)
    return name


def literal_pairs(
    fs: Any, path: Any, target: Any, is_dir: Callable[[Any], bool], recursive: bool, maxdepth: int | None
) -> tuple[list[str], list[str]] | None:
    """Return sources and targets of a copy if ``path`` looks like a pattern, but is there and matches nothing else.

    As a shell does it; fsspec would say that ``a[1].txt`` does not exist.
    """
    if not isinstance(path, str) or not isinstance(target, str) or not has_magic(path):
        return None
    name = fs._strip_protocol(path)
    if not fs.exists(name) or not set(fs.glob(path)) <= {name}:
        return None
    names = [name]
    if fs.isdir(name):
        names = fs.find(name, maxdepth=maxdepth, withdirs=True) if recursive else []
    into = (trailing_sep(target) or is_dir(target)) and not trailing_sep(path)
    return names, other_paths(names, target, exists=into) if names else []


class WritableFileSystem(BaseFileSystem):
    """The methods that write; a backend that only reads refuses each with :class:`~xds.errors.ReadOnlyError`."""

    # Folders.

    def mkdir(self, path: Any, create_parents: bool = True, **kwargs: Any) -> None:
        """Make a folder, and those above it unless ``create_parents`` is false."""
        backend, path = self._writing("make the folder", path), self._strip_protocol(path)
        if self.exists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        if create_parents:
            self.makedirs(path, exist_ok=True)
        else:
            backend.mkdir(path)

    def makedirs(self, path: Any, exist_ok: bool = False) -> None:
        """Make a folder and those above it."""
        backend, path = self._writing("make the folder", path), self._strip_protocol(path)
        parent = self._parent(path)
        if parent not in (path, "") and not self.exists(parent):
            with contextlib.suppress(FileExistsError):  # somebody else made it meanwhile
                self.makedirs(parent, exist_ok=True)
        try:
            backend.mkdir(path)
        except OSError:
            # Some systems answer for an existing folder that it could not be made there.
            if not exist_ok or not self.isdir(path):
                raise

    def rmdir(self, path: Any) -> None:
        """Remove an empty folder."""
        self._writing("remove the folder", path).rmdir(self._strip_protocol(path))

    def _make_parent(self, path: str) -> None:
        if self.auto_mkdir:
            self.makedirs(self._parent(path), exist_ok=True)

    # Names.

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None, **kwargs: Any) -> None:
        """Remove files, links and, with ``recursive``, folders and all in them.

        Names are taken by the letter, not as patterns; ``maxdepth`` is of no effect, as in fsspec's local files.
        """
        for one in path if isinstance(path, (list, tuple, set)) else [path]:
            backend, name = self._writing("remove", one), self._strip_protocol(one)
            checkpoint()
            if self.isdir(name) and not self.islink(name):
                if not recursive:
                    raise ValueError(f"{name}: cannot delete a folder, set recursive=True")
                backend.rmtree(name)
            else:
                backend.unlink(name)

    def rm_file(self, path: Any, **kwargs: Any) -> None:
        """Remove a file or a link."""
        self._writing("remove", path).unlink(self._strip_protocol(path))

    def mv(self, path1: Any, path2: Any, recursive: bool = True, maxdepth: int | None = None, **kwargs: Any) -> None:
        """Move a file, link or folder; into ``path2`` if that is a folder. As :func:`shutil.move`.

        ``recursive`` and ``maxdepth`` are of no effect, as in fsspec's local files.

        Raises:
            shutil.Error: the folder holds that name already, or would move into itself.
        """
        backend = self._writing("move", path1)
        old, new = self._strip_protocol(path1), self._strip_protocol(path2)
        self._make_parent(new)
        is_folder = self.isdir(old) and not self.islink(old)
        if self.isdir(new):
            # As "identity" tells bytes apart, "ino" of two folders of one device is enough here.
            if old == new or (self.exists(old) and self._same(old, new)):
                return
            new = f"{new.rstrip('/')}/{old.rpartition('/')[2]}"
            if self.exists(new):
                raise shutil.Error(f"Destination path '{new}' already exists")
        elif is_folder and self.exists(new):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new)
        if is_folder and f"{new}/".startswith(f"{old}/") and new != old:
            raise shutil.Error(f"Cannot move a directory '{old}' into itself '{new}'.")
        if is_folder and not self.exists(self._parent(new)):
            self.makedirs(self._parent(new), exist_ok=True)  # of folders alone, as shutil.move does it
        self.info(old)  # raises for what is not there, whatever stands in the way of the new name
        backend.rename(old, new)

    def _same(self, one: str, other: str) -> bool:
        first, second = self.info(one), self.info(other)
        return bool(first["identity"][:2] == second["identity"][:2] and first["type"] == second["type"])

    def mv_file(self, path1: Any, path2: Any, **kwargs: Any) -> None:
        """Give a file another name, in place of what has it."""
        self._writing("move", path1).rename(self._strip_protocol(path1), self._strip_protocol(path2))

    def cp_file(self, path1: Any, path2: Any, **kwargs: Any) -> None:
        """Copy a file, at once or not at all; of a folder, make the folder alone.

        Raises:
            shutil.SameFileError: both are the same file.
        """
        backend = self._writing("copy to", path2)
        old, new = self._strip_protocol(path1), self._strip_protocol(path2)
        checkpoint()
        self._make_parent(new)
        if self.isfile(old):
            backend.copy(old, new)
        elif self.isdir(old):
            self.makedirs(new, exist_ok=True)
        else:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), old)

    def copy(self, path1: Any, path2: Any, recursive: bool = False, **kwargs: Any) -> None:
        """Copy files and, with ``recursive``, folders, as ``cp`` does."""
        self._writing("copy to", path2)
        pairs = literal_pairs(self, path1, path2, self.isdir, recursive, kwargs.get("maxdepth"))
        path1, path2 = pairs or (path1, path2)
        super().copy(path1, path2, recursive=recursive, **kwargs)

    def touch(self, path: Any, truncate: bool = True, **kwargs: Any) -> None:
        """Make an empty file, or set the times of what is there; ``truncate`` empties it."""
        backend, name = self._writing("touch", path), self._strip_protocol(path)
        self._make_parent(name)
        backend.touch(name, truncate=truncate)

    # Bytes.

    def pipe(self, path: Any, value: Any = None, **kwargs: Any) -> None:
        """Write ``value`` to a file, or each value of a dict to its path."""
        self._writing("write", ", ".join(map(str, path)) if isinstance(path, Mapping) else path)
        super().pipe(path, value, **kwargs)

    def pipe_file(self, path: Any, value: Any, mode: str = "overwrite", **kwargs: Any) -> None:
        """Write ``value`` (bytes, or any buffer) to a file, at once or not at all.

        Args:
            path: file.
            value: what it holds then.
            mode: ``overwrite``, or ``create``: only if nothing is there.
            kwargs: as of :meth:`open`.
        """
        if mode not in ("overwrite", "create"):
            raise ValueError(f"mode={mode!r}: must be 'overwrite' or 'create'")
        checkpoint()
        with self.open(path, "xb" if mode == "create" else "wb", **kwargs) as file:
            file.write(value)

    def put_file(
        self, lpath: Any, rpath: Any, callback: Any = DEFAULT_CALLBACK, mode: str = "overwrite", **kwargs: Any
    ) -> None:
        """Copy one local file here, at once or not at all; of a folder, make the folder alone.

        Args:
            lpath: local file.
            rpath: file here; the folders above it are made.
            callback: told the size, and each piece that has gone.
            mode: ``overwrite``, or ``create``: only if nothing is there.
            kwargs: as of :meth:`open`.
        """
        if mode not in ("overwrite", "create"):
            raise ValueError(f"mode={mode!r}: must be 'overwrite' or 'create'")
        self._writing("write", rpath)
        lpath, rpath = local_path(lpath), self._strip_protocol(rpath)
        if os.path.isdir(lpath):  # noqa: PTH112 (text)
            self.makedirs(rpath, exist_ok=True)
            return
        with open(lpath, "rb", buffering=0) as source:  # noqa: PTH123 (text)
            size = os.fstat(source.fileno()).st_size
            self.makedirs(self._parent(rpath), exist_ok=True)
            with self.open(rpath, "xb" if mode == "create" else "wb", **kwargs) as target:
                callback.set_size(size)
                piece = memoryview(bytearray(min(size, _PIECE_NBYTES) or 1))
                while count := source.readinto(piece):
                    checkpoint()
                    target.write(piece[:count])
                    callback.relative_update(count)

    def put(self, lpath: Any, rpath: Any, recursive: bool = False, **kwargs: Any) -> None:
        """Copy local files here."""
        self._writing("write", rpath)
        pairs = literal_pairs(_LOCAL, lpath, rpath, self.isdir, recursive, kwargs.get("maxdepth"))
        lpath, rpath = pairs or (lpath, rpath)
        super().put(lpath, rpath, recursive=recursive, **kwargs)

    def get_file(
        self, rpath: Any, lpath: Any = None, callback: Any = DEFAULT_CALLBACK, outfile: Any = None, **kwargs: Any
    ) -> None:
        """Copy one file to a local file or file object; of a folder, make the folder alone.

        What fails leaves no half file that was not there before. The folders above ``lpath`` are made.
        """
        if outfile is None and isfilelike(lpath):
            outfile = lpath
        if outfile is not None:
            with self.open(rpath, "rb", **kwargs) as source:
                _move_pieces(source, outfile, callback)
            return
        lpath = local_path(lpath)
        if self.isdir(rpath):
            os.makedirs(lpath, exist_ok=True)  # noqa: PTH103 (text)
            return
        if not self.exists(rpath):  # also where a file stands for a folder, as of cp_file
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._strip_protocol(rpath))
        with self.open(rpath, "rb", **kwargs) as source:
            os.makedirs(os.path.dirname(lpath), exist_ok=True)  # noqa: PTH103 (text)
            was_there = os.path.lexists(lpath)
            try:
                with open(lpath, "wb", buffering=0) as target:  # noqa: PTH123 (text)
                    _move_pieces(source, target, callback)
            except BaseException:
                if not was_there:
                    with contextlib.suppress(OSError):
                        os.unlink(lpath)  # noqa: PTH108 (text)
                raise

    def get(self, rpath: Any, lpath: Any, recursive: bool = False, **kwargs: Any) -> None:
        """Copy files to local paths."""
        local = local_path(lpath) + "/" * trailing_sep(lpath) if isinstance(lpath, str) else lpath
        pairs = literal_pairs(self, rpath, local, _LOCAL.isdir, recursive, kwargs.get("maxdepth"))
        rpath, lpath = pairs or (rpath, lpath)
        super().get(rpath, lpath, recursive=recursive, **kwargs)


def _move_pieces(source: Any, target: Any, callback: Any) -> None:
    callback.set_size(source.size)
    while piece := memoryview(source.read(_PIECE_NBYTES)):
        checkpoint()
        count = len(piece)
        while piece:
            # A raw file may take fewer; a file object that does not say has taken all.
            taken = target.write(piece)
            piece = piece[len(piece) if taken is None else taken :]
        callback.relative_update(count)
