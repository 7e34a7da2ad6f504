"""Ranges and segments: what a read moves, as plain values. Layer: plan; pure, imports nothing of ours.

A *segment* says: these bytes of this file go to this address. Segments travel as NumPy records so that twenty
thousand of them cost no Python object each; the native core reads the same layout.
"""

from __future__ import annotations

import operator
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

#: One segment, 32 bytes, little endian; ``struct xds_segment`` in ``xds/native/src/abi.h`` is the same.
#:
#: ``offset`` in the file, bytes; ``nbytes``; ``destination`` address; ``file`` index into the transfer's handles;
#: ``flags``: bit 0 (:data:`GAP_WRITABLE`).
SEGMENT = np.dtype([("offset", "<u8"), ("nbytes", "<u8"), ("destination", "<u8"), ("file", "<u4"), ("flags", "<u4")])

#: The bytes between the end of the previous segment of the same batch and the start of this one, in the destination,
#: are padding that may be overwritten (at most 4095 of them): both can then travel in one copy.
GAP_WRITABLE = 1

Segments = npt.NDArray[Any]


def resolve_range(start: SupportsIndex | None, end: SupportsIndex | None, size: int) -> tuple[int, int]:
    """Return ``(start, end)`` of ``data[start:end]`` for ``size`` bytes: Python's slice rules, ``end >= start``."""
    low, high, _ = slice(
        None if start is None else operator.index(start), None if end is None else operator.index(end)
    ).indices(size)
    return low, max(low, high)


def segments(count: int) -> Segments:
    """Return ``count`` zeroed segments."""
    return np.zeros(count, dtype=SEGMENT)
