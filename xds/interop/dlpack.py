"""DLPack capsules over a block, made natively, all in one call. Layer: interop, over native; imports no framework."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from xds import native
from xds.interop.base import Block, Places
from xds.interop.dtypes import BITS

# enum DLDataTypeCode of dlpack.h
_CODES = {
    **dict.fromkeys(("I8", "I16", "I32", "I64"), 0),
    **dict.fromkeys(("U8", "U16", "U32", "U64"), 1),
    **dict.fromkeys(("F16", "F32", "F64"), 2),
    "BF16": 4,
    "C64": 5,
    "BOOL": 6,
    "F8_E4M3": 10,
    "F8_E4M3FNUZ": 11,
    "F8_E5M2": 12,
    "F8_E5M2FNUZ": 13,
    "F8_E8M0": 14,
}

#: Per stored type, in the order of BITS: what DLPack calls it (code, bits << 8, lanes << 16), 0 where it is packed.
TYPES = np.array([_CODES[name] | BITS[name] << 8 | 1 << 16 if name in _CODES else 0 for name in BITS], np.uint32)

# enum DLDeviceType
_CPU, _CUDA = 1, 2

_FUNCTIONS = (
    "PyList_New",
    "PyList_SetItem",
    "PyCapsule_New",
    "PyCapsule_IsValid",
    "PyCapsule_GetPointer",
    "Py_IncRef",
    "Py_DecRef",
    "Py_IsInitialized",
    "PyGILState_Ensure",
    "PyGILState_Release",
)


class _Python(ctypes.Structure):
    # struct xds_dlpack_python in xds/native/src/dlpack.cpp
    _fields_ = tuple((name, ctypes.c_void_p) for name in (*_FUNCTIONS, "none"))


@functools.cache
def _native() -> tuple[Any, _Python]:
    # PyDLL: the function makes Python objects, so the interpreter lock must stay held.
    make = ctypes.PyDLL(native.library()._name).xds_dlpack_capsules
    make.restype = ctypes.py_object
    number = ctypes.c_uint64
    pointer = ctypes.c_void_p
    make.argtypes = (pointer, ctypes.py_object, number, ctypes.c_int32, ctypes.c_int32, number, *[pointer] * 6)
    python = _Python(
        *(ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value for name in _FUNCTIONS), id(None)
    )
    return make, python


def capsules(block: Block, places: Places, types: npt.NDArray[np.uint32]) -> list[Any]:
    """Return a capsule per place, ``None`` where ``types`` (like :data:`TYPES`) has 0.

    Whatever is made of a capsule holds the block's ``keepalive``.
    """
    make, python = _native()
    kind, ordinal = (_CPU, 0) if block.device is None else (_CUDA, block.device)
    columns = [np.ascontiguousarray(column) for column in (*places.columns(), types)]
    addresses = [column.ctypes.data for column in columns]
    made: list[Any] = make(
        ctypes.addressof(python), block.keepalive, block.address, kind, ordinal, len(places), *addresses
    )
    return made
