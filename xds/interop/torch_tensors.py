"""torch tensors in host or GPU memory. Layer: interop; the only module that imports torch.

Each tensor has a storage of its own size inside the block, so that saving one tensor writes that tensor alone and
code that finds shared weights by their storage sees none.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import numpy as np
import numpy.typing as npt

from xds.errors import DeviceMemoryError
from xds.interop import dlpack, host
from xds.interop.base import Block, Framework, Places
from xds.interop.dtypes import BITS, ML_DTYPES, NUMPY, packed_nbytes


class TorchFramework(Framework):
    """See :class:`~xds.interop.base.Framework`.

    F4 comes as ``torch.float4_e2m1fn_x2`` (two values an element: the last dimension is halved) where this torch has
    it and the last dimension is even, else raw.
    """

    name = "torch"

    def __init__(self) -> None:
        self._torch = importlib.import_module("torch")
        self._dtype = functools.cache(self._find_dtype)

    def _find_dtype(self, dtype: str) -> Any:
        if dtype == "F4":
            return getattr(self._torch, "float4_e2m1fn_x2", None)
        name = NUMPY.get(dtype) or ML_DTYPES.get(dtype)
        return None if name is None else getattr(self._torch, name, None)

    def is_raw(self, dtype: str, shape: tuple[int, ...]) -> bool:
        """See the base class."""
        # A pair of F4 values across two rows is one byte, which no element of a tensor can be.
        return self._dtype(dtype) is None or (dtype == "F4" and shape[-1] % 2 != 0)

    def empty_block(self, nbytes: int, device: int | None) -> Block:
        """See the base class."""
        torch = self._torch
        if device is None:
            memory, address = host.allocate(nbytes)
            return Block(address, nbytes, None, torch.frombuffer(memory, dtype=torch.uint8))
        try:
            tensor = torch.empty(max(nbytes, 1), dtype=torch.uint8, device=torch.device("cuda", device))
        except torch.cuda.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(device)
            raise DeviceMemoryError(
                f"CUDA device {device}: a block of {nbytes} bytes does not fit: {free} of {total} bytes are free"
            ) from error
        return Block(tensor.data_ptr(), nbytes, torch.cuda.current_stream(device).cuda_stream, tensor, device)

    def view(self, block: Block, offset: int, dtype: str, shape: tuple[int, ...]) -> Any:
        """See the base class."""
        torch, base, nbytes = self._torch, block.keepalive, packed_nbytes(dtype, shape)
        torch_type = self._dtype(dtype)
        if torch_type is None or dtype == "F4":
            if self.is_raw(dtype, shape):
                torch_type, shape = torch.uint8, (nbytes,)
            else:
                shape = (*shape[:-1], shape[-1] // 2)
        storage = base.untyped_storage()[offset : offset + nbytes]
        return torch.empty(0, dtype=torch_type, device=base.device).set_(storage, 0, shape)

    def views(self, block: Block, places: Places) -> list[Any]:
        """See the base class. By DLPack, several times faster than :meth:`view` per tensor, with the same result."""
        capsules = dlpack.capsules(block, places, self._types)
        take = self._from_dlpack
        if None not in capsules:
            return list(map(take, capsules))
        return [
            self.view(block, *row) if capsule is None else take(capsule)
            for capsule, row in zip(capsules, places.rows(), strict=True)
        ]

    @property
    def _from_dlpack(self) -> Any:
        # The function behind torch.from_dlpack for capsules, without its checks of the argument's type.
        return getattr(self._torch._C, "_from_dlpack", None) or self._torch.utils.dlpack.from_dlpack

    @functools.cached_property
    def _types(self) -> npt.NDArray[np.uint32]:
        """What of :data:`dlpack.TYPES` this torch takes, and takes for the right type."""
        zero, one = np.zeros(1, np.uint64), np.ones(1, np.uint64)
        types = dlpack.TYPES.copy()
        block = self.empty_block(256, None)
        for code, name in enumerate(BITS):
            places = Places(zero, np.array([code], np.uint8), np.ones(1, np.uint8), zero, one)
            (capsule,) = dlpack.capsules(block, places, types)
            try:
                if capsule is not None and self._from_dlpack(capsule).dtype != self._dtype(name):
                    types[code] = 0
            except (RuntimeError, BufferError, TypeError):
                types[code] = 0
        return types
