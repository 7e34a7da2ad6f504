"""What the process holds between reads, and how to give it back. Layer: filesystem."""

from __future__ import annotations

from xds.engine import mover


def close() -> None:
    """End the mover's threads and free its pinned ring. A later read starts afresh; a second call does nothing."""
    mover.close()


def pinned_nbytes() -> int:
    """Return the bytes of pinned memory held for staging."""
    return mover.pinned_nbytes()
