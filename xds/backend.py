"""What a backend offers the file system: names, handles, transfers. Layer: between filesystem and the backends.

Typing only: a backend is found by entry point (group ``xds.backends``) and never imported by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

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

    def done(self) -> bool:
        """Whether everything has landed or failed; never blocks."""

    def cancel(self) -> None:
        """Stop and drain: on return no destination will be written any more. A second call does nothing."""

    def __enter__(self) -> Transfer: ...

    def __exit__(self, *exc: object) -> None: ...


class Backend(Protocol):
    """One kind of storage. Paths are as :meth:`fsspec.AbstractFileSystem._strip_protocol` leaves them."""

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
