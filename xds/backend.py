"""What a backend offers the file system: names, handles, transfers. Layer: between filesystem and the backends.

Typing only: a backend is found by entry point (group ``xds.backends``) and never imported by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from xds.plan import Segments
from xds.report import ReadReport


class Handle(Protocol):
    """One open file: a snapshot of its size and identity, and whatever reads it. Safe for many threads."""

    path: str
    nbytes: int
    #: Changes whenever the file's bytes may have changed (device, inode, size, times of modification and change).
    identity: tuple[int, ...]

    def pread_into(self, view: memoryview, offset: int) -> int:
        """Read into host memory until ``view`` is full or the file ends; return bytes read. For small reads."""

    def check_unchanged(self) -> None:
        """Raise :class:`~xds.errors.FileChangedError` if the file is not what it was at open."""

    def close(self) -> None:
        """Close; a second call does nothing."""


class Transfer(Protocol):
    """Bytes on their way. Batches of segments move as soon as they are added.

    As a context manager: leaving by an exception cancels and drains, so that no byte is written afterwards.
    """

    def add(self, segments: Segments, *, stream: int | None = None, keepalive: object = None) -> int:
        """Start to move a batch and return its number (0, 1, ...).

        ``stream`` is a CUDA stream handle (0 is the legacy default stream): no destination is written before the work
        already on it is done. ``keepalive`` is held until the transfer has drained.
        """

    def seal(self) -> None:
        """Say that no more batches come."""

    def next_ready(self) -> int | None:
        """Wait for any batch not yet returned, in the order in which they land; ``None`` after the last (sealed)."""

    def wait(self) -> ReadReport:
        """Seal, wait for all, return the report. Raises what failed, after draining."""

    async def wait_async(self) -> ReadReport:
        """As :meth:`wait`, for a coroutine: never blocks its loop. Cancelling the coroutine cancels and drains."""

    def done(self) -> bool:
        """Whether everything has landed or failed; never blocks."""

    def cancel(self) -> None:
        """Stop and drain: on return no destination will be written any more. A second call does nothing."""

    def __enter__(self) -> Transfer: ...

    def __exit__(self, *exc: object) -> None: ...


#: How much is on the storage, not only in memory, when a commit returns: nothing for certain; the bytes of the file;
#: those, its metadata, and its name in the folder.
Fsync = Literal["none", "data", "full"]

#: ``w``: replace, ``x``: only if nothing is there, ``a``: at the end, ``r+``: change in place; ``+``: read as well.
WriteMode = Literal["wb", "xb", "ab", "w+b", "x+b", "a+b", "r+b"]


class Writer(Protocol):
    """One file being written. ``w`` and ``x`` show nothing under the name before :meth:`commit`."""

    path: str
    #: Bytes that are there at the beginning: 0 for ``w`` and ``x``.
    nbytes: int

    def pwrite(self, view: memoryview, offset: int) -> None:
        """Write all of ``view`` (bytes) at ``offset``; files opened with ``a`` take it at their end."""

    def pread_into(self, view: memoryview, offset: int) -> int:
        """Read what the file holds now; only for modes with ``+``. Returns bytes read."""

    def transfer_out(
        self,
        *,
        device: int | None = None,
        require: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> Transfer:
        """Begin a transfer whose segments move memory to this file (``destination`` is the memory's address).

        The file must be as long as it will be: see :meth:`truncate`.
        """

    def truncate(self, nbytes: int) -> None:
        """Cut the file, or lengthen it with zeros."""

    def commit(self, *, fsync: Fsync = "none") -> None:
        """Give the file its name, at once or not at all. After a commit or a discard, neither does anything.

        Raises:
            FileExistsError: mode ``x``, and somebody else was faster.
        """

    def discard(self) -> None:
        """Let go of what was written; what was under the name stays."""


class Backend(Protocol):
    """One kind of storage. Paths are as :meth:`fsspec.AbstractFileSystem._strip_protocol` leaves them.

    A backend that only reads has none of the methods of :class:`WritingBackend`.
    """

    def info(self, path: str) -> dict[str, Any]:
        """Return name, size, type, mtime, ... of one path (fsspec's ``info``)."""

    def ls(self, path: str) -> list[dict[str, Any]]:
        """Return the entries of a folder, sorted by name; of a file, the file itself."""

    def open(self, path: str) -> Handle:
        """Open for reading; refuses folders, FIFOs, sockets and character devices."""

    def transfer(
        self,
        handles: Sequence[Handle],
        *,
        device: int | None = None,
        require: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> Transfer:
        """Begin a transfer from ``handles`` into arrays of one device (``None``: host memory).

        ``timeout_s`` bounds the time without progress. ``require`` as in :func:`xds.load`.
        """


class WritingBackend(Backend, Protocol):
    """Storage that can be written too. Builtin exceptions say what is missing, there already, or forbidden."""

    def create(self, path: str, *, mode: WriteMode, permissions: int | None = None, deferred: bool = False) -> Writer:
        """Open for writing.

        Args:
            path: links are followed, and stay.
            mode: see :data:`WriteMode`.
            permissions: mode bits of a new file, as of :func:`os.open`. A file that is replaced hands its own on.
            deferred: nothing may be seen before the commit, of ``a`` too.
        """

    def mkdir(self, path: str) -> None:
        """Make one folder."""

    def rmdir(self, path: str) -> None:
        """Remove an empty folder."""

    def rmtree(self, path: str) -> None:
        """Remove a folder and all in it; links are removed, not followed."""

    def unlink(self, path: str) -> None:
        """Remove a file or a link."""

    def rename(self, old: str, new: str, *, replace: bool = True) -> None:
        """Give a file, folder or link another name; without ``replace``, only if nothing has it."""

    def copy(self, old: str, new: str) -> None:
        """Make ``new`` a file of the bytes of ``old``, at once or not at all."""

    def touch(self, path: str, *, truncate: bool) -> None:
        """Make an empty file, or set the times of what is there; ``truncate`` empties it."""
