"""What a framework offers the loader: blocks of memory, arrays inside them. Layer: interop; imports no framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar


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
