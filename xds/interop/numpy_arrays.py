"""NumPy arrays in host memory. Layer: interop; ml_dtypes is imported when a tensor needs it."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import numpy as np

from xds.interop import host
from xds.interop.base import Block, Framework
from xds.interop.dtypes import ML_DTYPES, NUMPY, packed_nbytes


@functools.cache
def numpy_dtype(dtype: str) -> np.dtype[Any] | None:
    """Return NumPy's type for a stored type, ``None`` where values are not whole bytes (F4, F6)."""
    if dtype in NUMPY:
        return np.dtype(NUMPY[dtype])
    if dtype in ML_DTYPES:
        found: np.dtype[Any] = np.dtype(getattr(importlib.import_module("ml_dtypes"), ML_DTYPES[dtype]))
        return found
    return None


class NumpyFramework(Framework):
    """See :class:`~xds.interop.base.Framework`."""

    name = "numpy"

    def is_raw(self, dtype: str, shape: tuple[int, ...]) -> bool:
        """See the base class."""
        return numpy_dtype(dtype) is None

    def empty_block(self, nbytes: int, device: int | None) -> Block:
        """See the base class."""
        memory, address = host.allocate(nbytes)
        return Block(address, nbytes, None, memory)

    def view(self, block: Block, offset: int, dtype: str, shape: tuple[int, ...]) -> Any:
        """See the base class."""
        numpy_type = numpy_dtype(dtype)
        if numpy_type is None:
            return np.ndarray((packed_nbytes(dtype, shape),), np.uint8, block.keepalive, offset)
        return np.ndarray(shape, numpy_type, block.keepalive, offset)
