"""CuPy arrays in GPU memory, from CuPy's current allocator. Layer: interop; the only module that imports CuPy."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import numpy as np

from xds.errors import DeviceMemoryError
from xds.interop.base import Block, Framework
from xds.interop.dtypes import packed_nbytes
from xds.interop.numpy_arrays import numpy_dtype


class CupyFramework(Framework):
    """See :class:`~xds.interop.base.Framework`. Types that this CuPy refuses come raw."""

    name = "cupy"

    def __init__(self) -> None:
        self._cupy = importlib.import_module("cupy")
        self._dtype = functools.cache(self._find_dtype)

    def _find_dtype(self, dtype: str) -> Any:
        numpy_type = numpy_dtype(dtype)
        if numpy_type is None:
            return None
        try:
            # A null pointer: asks whether CuPy takes the type, touches no device.
            null = self._cupy.cuda.MemoryPointer(self._cupy.cuda.UnownedMemory(0, 0, None, 0), 0)
            self._cupy.ndarray((0,), numpy_type, null)
        except (TypeError, ValueError, KeyError):
            return None
        return numpy_type

    def is_raw(self, dtype: str, shape: tuple[int, ...]) -> bool:
        """See the base class."""
        return self._dtype(dtype) is None

    def empty_block(self, nbytes: int, device: int | None) -> Block:
        """See the base class."""
        cuda = self._cupy.cuda
        with cuda.Device(device):
            try:
                memory = cuda.alloc(max(nbytes, 1))
            except cuda.memory.OutOfMemoryError as error:
                free, total = cuda.runtime.memGetInfo()
                raise DeviceMemoryError(
                    f"CUDA device {device}: a block of {nbytes} bytes does not fit: {free} of {total} bytes are free"
                ) from error
            stream = cuda.get_current_stream().ptr
        return Block(memory.ptr, nbytes, stream, memory, device)

    def view(self, block: Block, offset: int, dtype: str, shape: tuple[int, ...]) -> Any:
        """See the base class."""
        cupy_type = self._dtype(dtype)
        if cupy_type is None:
            return self._cupy.ndarray((packed_nbytes(dtype, shape),), np.uint8, block.keepalive + offset)
        return self._cupy.ndarray(shape, cupy_type, block.keepalive + offset)
