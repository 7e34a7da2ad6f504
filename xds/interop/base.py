"""What a framework offers the loader: blocks of memory, arrays inside them. Layer: interop; imports no framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import numpy as np
import numpy.typing as npt

from xds.interop.dtypes import BITS

_NAMES = tuple(BITS)


@dataclass(frozen=True, slots=True)
class Block:
    """Uninitialised memory of one device, from the framework's own allocator.

    Attributes:
        address: of the first byte; a multiple of 256.
        nbytes: size.
        stream: CUDA stream handle on which the memory may be written, or ``None`` for host memory.
        keepalive: what must stay referenced for the memory to stay allocated; every array made from it holds it.
        device: CUDA ordinal, or ``None`` for host memory.
    """

    address: int
    nbytes: int
    stream: int | None
    keepalive: Any
    device: int | None = None

    def __reduce__(self) -> NoReturn:
        # A deep copy would hold a copy of the memory, and the address of the first one.
        raise TypeError("a Block cannot be copied or pickled: make another one")


@dataclass(frozen=True, slots=True)
class Places:
    """Tensors inside one block; a column each.

    Attributes:
        offset: u64 per tensor, where it begins in the block, bytes; a multiple of 256.
        dtype: u8 per tensor, position of its stored type in :data:`~xds.interop.dtypes.BITS`.
        ndim: u8 per tensor.
        shape_offset: u64 per tensor, index into ``shapes`` of its first dimension.
        shapes: u64, dimensions of these tensors and perhaps of others.
    """

    offset: npt.NDArray[np.uint64]
    dtype: npt.NDArray[np.uint8]
    ndim: npt.NDArray[np.uint8]
    shape_offset: npt.NDArray[np.uint64]
    shapes: npt.NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.offset)

    def columns(self) -> tuple[npt.NDArray[Any], ...]:
        """Return the columns in the order of the attributes."""
        return self.offset, self.dtype, self.ndim, self.shape_offset, self.shapes

    def rows(self) -> Iterator[tuple[int, str, tuple[int, ...]]]:
        """Yield offset, stored type and shape of each tensor."""
        if len(self) == 0:
            return
        starts = self.shape_offset.astype(np.int64)
        ends = starts + self.ndim
        # One list over the range that they span serves all rows.
        low = int(starts.min())
        dims = self.shapes[low : int(ends.max())].tolist()
        for offset, code, start, end in zip(
            self.offset.tolist(), self.dtype.tolist(), (starts - low).tolist(), (ends - low).tolist(), strict=True
        ):
            yield offset, _NAMES[code], tuple(dims[start:end])


class Framework(ABC):
    """Blocks and arrays of one array library; a stateless object, safe for many threads."""

    name: ClassVar[str]
    #: Whether arrays may be made before their bytes have landed (making them reads nothing).
    early: ClassVar[bool] = True

    @abstractmethod
    def is_raw(self, dtype: str, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this stored type and shape comes as a 1-d uint8 array of the stored bytes."""

    def check(self, dtypes: Iterable[str]) -> None:
        """Raise :class:`~xds.errors.ArrayError` for a type that could only come as another one."""
        del dtypes  # most frameworks have every type, or say that it comes raw

    @abstractmethod
    def empty_block(self, nbytes: int, device: int | None) -> Block:
        """Allocate; raises MemoryError or :class:`~xds.errors.DeviceMemoryError`, which name need and free bytes."""

    @abstractmethod
    def view(self, block: Block, offset: int, dtype: str, shape: tuple[int, ...]) -> Any:
        """Return the array at ``offset`` of ``block``; ``offset`` is a multiple of 256."""

    def views(self, block: Block, places: Places) -> list[Any]:
        """Return the arrays of all ``places``."""
        view = self.view
        return [view(block, offset, dtype, shape) for offset, dtype, shape in places.rows()]
