"""Where each tensor goes: blocks of memory, offsets inside them, segments to move. Layer: checkpoint; pure NumPy.

Must not import anything of ours but the plan. Every tensor begins at a multiple of 256 bytes; tensors stay in file
order, so that neighbours whose sizes are such multiples stay contiguous and travel in one segment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from xds.plan import GAP_WRITABLE, Segments, segments

#: Every tensor begins at a multiple of this many bytes in memory.
ALIGNMENT = 256

#: Tensors share blocks of about this size, so that freeing some of them frees memory; a larger tensor has its own.
BLOCK_NBYTES = 128 << 20

U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """One block of memory and the tensors in it.

    Attributes:
        first: position of its first tensor among the chosen ones.
        last: one past the position of its last tensor.
        nbytes: size of the block, a multiple of :data:`ALIGNMENT`, at least one.
        offsets: u64 per tensor, where it begins in the block, bytes.
        segments: what to move, with destinations counted from the start of the block.
    """

    first: int
    last: int
    nbytes: int
    offsets: U64
    segments: Segments

    def segments_at(self, address: int) -> Segments:
        """Return the segments for a block that was allocated at ``address``."""
        placed = self.segments.copy()
        placed["destination"] += np.uint64(address)
        return placed


def plan_blocks(
    file: npt.NDArray[np.uint32], offset: U64, nbytes: U64, *, block_nbytes: int = BLOCK_NBYTES
) -> Iterator[BlockPlan]:
    """Yield the blocks for tensors given in file order.

    Args:
        file: per tensor, the index of its file in the transfer.
        offset: per tensor, where it begins in its file, bytes.
        nbytes: per tensor, its size; 0 is allowed.
        block_nbytes: about the size of a block that holds several tensors; never exceeded by them.
    """
    align = np.uint64(ALIGNMENT - 1)
    padded = (nbytes + align) & ~align
    ends = np.cumsum(padded, dtype=np.uint64)
    count, first = len(nbytes), 0
    while first < count:
        start = ends[first] - padded[first]
        last = int(np.searchsorted(ends, start + np.uint64(block_nbytes), side="right"))
        last = max(last, first + 1)
        chosen = slice(first, last)
        offsets = ends[chosen] - padded[chosen] - start
        yield BlockPlan(
            first=first,
            last=last,
            nbytes=max(int(ends[last - 1] - start), ALIGNMENT),
            offsets=offsets,
            segments=_merge(file[chosen], offset[chosen], nbytes[chosen], offsets),
        )
        first = last


def _merge(file: npt.NDArray[np.uint32], offset: U64, nbytes: U64, destination: U64) -> npt.NDArray[Any]:
    full = nbytes > 0
    file, offset, nbytes, destination = file[full], offset[full], nbytes[full], destination[full]
    if len(nbytes) == 0:
        return segments(0)
    joins = (
        (file[1:] == file[:-1])
        & (offset[1:] == offset[:-1] + nbytes[:-1])
        & (destination[1:] == destination[:-1] + nbytes[:-1])
    )
    starts = np.flatnonzero(np.concatenate(([True], ~joins)))
    merged = segments(len(starts))
    merged["file"] = file[starts]
    merged["offset"] = offset[starts]
    merged["destination"] = destination[starts]
    merged["nbytes"] = np.add.reduceat(nbytes, starts)
    # What lies between two tensors of a block is padding that belongs to nobody.
    merged["flags"][1:] = GAP_WRITABLE
    return merged
