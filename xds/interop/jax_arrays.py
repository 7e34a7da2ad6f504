"""JAX arrays in host or GPU memory. Layer: interop; the only module that imports JAX.

JAX arrays are immutable, so they are made once their bytes are there. On the host JAX may keep the memory it is given
and then holds a reference to it; on a GPU the memory is CuPy's, handed over by DLPack.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from xds.errors import ArrayError
from xds.interop.base import Block, Framework
from xds.interop.dtypes import NUMPY, packed_nbytes
from xds.interop.numpy_arrays import NumpyFramework, numpy_dtype

_WIDE = frozenset({"F64", "I64", "U64"})
_UNSIGNED = {1: "U8", 2: "U16"}


class JaxFramework(Framework):
    """See :class:`~xds.interop.base.Framework`."""

    name = "jax"
    early = False

    def __init__(self) -> None:
        self._jax = importlib.import_module("jax")
        self._numpy = NumpyFramework()
        self._cupy: Framework | None = None

    def is_raw(self, dtype: str, shape: tuple[int, ...]) -> bool:
        """See the base class."""
        return numpy_dtype(dtype) is None

    def check(self, dtypes: Iterable[str]) -> None:
        """Refuse 64-bit types while JAX is set to make 32-bit ones of them."""
        wide = sorted(_WIDE.intersection(dtypes))
        if wide and not self._jax.config.jax_enable_x64:
            raise ArrayError(
                f"the checkpoint has tensors of {', '.join(wide)}, which JAX would turn into 32-bit ones; enable them "
                "with jax.config.update('jax_enable_x64', True), or pick other tensors with names="
            )

    def empty_block(self, nbytes: int, device: int | None) -> Block:
        """See the base class."""
        if device is None:
            return self._numpy.empty_block(nbytes, None)
        if self._cupy is None:
            from xds.interop import framework

            self._cupy = framework("cupy")
        return self._cupy.empty_block(nbytes, device)

    def view(self, block: Block, offset: int, dtype: str, shape: tuple[int, ...]) -> Any:
        """See the base class."""
        jax = self._jax
        if block.device is None:
            made = jax.device_put(self._numpy.view(block, offset, dtype, shape), jax.local_devices(backend="cpu")[0])
        else:
            made = self._on_gpu(block, offset, dtype, shape)
        wanted = numpy_dtype(dtype) or np.dtype(np.uint8)
        if made.dtype != wanted:
            raise ArrayError(f"JAX made {made.dtype} of a tensor of {dtype}; expected {wanted}")
        return made

    def _on_gpu(self, block: Block, offset: int, dtype: str, shape: tuple[int, ...]) -> Any:
        assert self._cupy is not None
        jax, numpy_type = self._jax, numpy_dtype(dtype)
        if numpy_type is None:
            dtype, shape = "U8", (packed_nbytes(dtype, shape),)
        elif packed_nbytes(dtype, shape) == 0:
            # DLPack of an empty array carries a null pointer, which JAX refuses.
            return jax.device_put(np.empty(shape, numpy_type), jax.local_devices(backend="gpu")[block.device or 0])
        elif dtype not in NUMPY:
            # CuPy does not export these types: they travel as unsigned ones and are cast bit by bit.
            plain = self._cupy.view(block, offset, _UNSIGNED[numpy_type.itemsize], shape)
            return jax.lax.bitcast_convert_type(jax.dlpack.from_dlpack(plain), numpy_type)
        return jax.dlpack.from_dlpack(self._cupy.view(block, offset, dtype, shape))
