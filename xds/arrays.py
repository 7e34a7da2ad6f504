"""Arrays of any framework as memory to read into or write from: address, bytes, device, stream. Layer: file system.

Imports no framework: an array of one can only exist when it is already imported. An array is asked for torch's own
attributes, then DLPack, then ``__cuda_array_interface__`` (v3), then the buffer protocol. The element type is of no
interest; size is in bytes.
"""

from __future__ import annotations

import ctypes
import operator
import sys
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from xds.errors import ArrayError

# DLDeviceType, dlpack.h.
_DL_CPU, _DL_CUDA, _DL_CUDA_HOST, _DL_CUDA_MANAGED = 1, 2, 3, 13
# DLPACK_FLAG_BITMASK_*, dlpack.h.
_DL_READ_ONLY, _DL_IS_COPIED, _DL_SUBBYTE_PADDED = 1, 2, 4

#: Frameworks whose arrays may not change once they are made, whatever their pointers allow.
_IMMUTABLE = {"jax": "JAX", "jaxlib": "JAX", "tensorflow": "TensorFlow"}


@dataclass(frozen=True, slots=True)
class Destination:
    """Memory that bytes can be read into, or (:func:`source`) written from.

    Attributes:
        address: first byte; a device address if ``device`` is not ``None``. 0 if ``nbytes`` is 0.
        nbytes: size in bytes.
        device: CUDA device ordinal, or ``None`` for host memory (pinned included).
        stream: handle of the CUDA stream that orders the read (0: legacy default stream); ``None`` for host memory.
        keepalive: what must live while bytes may arrive.
    """

    address: int
    nbytes: int
    device: int | None
    stream: int | None
    keepalive: object

    def __reduce__(self) -> NoReturn:
        # A deep copy would hold a copy of the array, and the address of the first one.
        raise TypeError("a Destination cannot be copied or pickled: ask for that of the array again")


def destination(array: Any, *, stream: Any = None) -> Destination:
    """Return the memory of ``array``.

    Args:
        array: NumPy, CuPy or torch array, or anything with DLPack, ``__cuda_array_interface__`` or the buffer protocol.
        stream: orders the read: an int handle, or a stream object of CuPy, torch, numba or cuda.core. Left out: the
            framework's current stream of the array's device, else the stream that the array names, else the legacy
            default stream. Of no effect for host arrays.

    Raises:
        ArrayError: read-only, not C-contiguous, managed memory, or no array at all.
        ForkedProcessError: GPU memory, in a process forked after its parent used the GPU.
    """
    return _memory(array, stream, writable=True)


def source(array: Any, *, stream: Any = None) -> Destination:
    """Return the memory of ``array`` for reading: as :func:`destination`, but read-only arrays are welcome too.

    Raises:
        ArrayError: not C-contiguous, managed memory, or no array at all.
        ForkedProcessError: as of :func:`destination`.
    """
    try:
        return _memory(array, stream, writable=False)
    except ArrayError as error:
        raise ArrayError(error.message.replace("cannot read into", "cannot write from", 1)) from error


def _memory(array: Any, stream: Any, *, writable: bool) -> Destination:
    if isinstance(array, np.ndarray):
        return _numpy(array, writable)
    if isinstance(array, (bytearray, memoryview, bytes)):
        return _buffer(array, writable)
    try:
        return _of_framework(array, stream, writable)
    except RuntimeError:
        # Each framework has words of its own for a GPU that cannot be used after a fork.
        from xds.engine import cuda

        cuda.device_count()
        cuda.check_not_forked()
        raise


def _of_framework(array: Any, stream: Any, writable: bool) -> Destination:
    framework = type(array).__module__.partition(".")[0]
    if writable and framework in _IMMUTABLE:
        _refuse(
            array,
            f"{_IMMUTABLE[framework]} arrays are immutable: nothing may be read into one that exists. Read into a "
            "CuPy, torch or NumPy array and convert it, or use xds.load(..., framework='jax')",
        )
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _torch(array, torch, stream)
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        return _dlpack(array, stream, writable)
    if hasattr(array, "__cuda_array_interface__"):
        return _cuda_array_interface(array, stream, writable)
    return _buffer(array, writable)


def _refuse(array: Any, why: str) -> NoReturn:
    raise ArrayError(f"cannot read into {type(array).__module__}.{type(array).__qualname__}: {why}")


def _refuse_read_only(array: Any) -> NoReturn:
    _refuse(array, "it is read-only; give a writable array")


def _refuse_layout(array: Any) -> NoReturn:
    _refuse(array, "it is not C-contiguous; read into a contiguous array and copy it over")


def _refuse_managed(array: Any) -> NoReturn:
    _refuse(array, "it is managed (unified) memory, which may move while bytes arrive; allocate plain device memory")


def _numpy(array: np.ndarray[Any, Any], writable: bool) -> Destination:
    flags = array.flags
    if not flags.c_contiguous:
        _refuse_layout(array)
    if writable and not flags.writeable:
        _refuse_read_only(array)
    if array.dtype.hasobject:
        _refuse(array, "its elements are Python objects, not bytes")
    nbytes = array.nbytes
    return Destination(array.__array_interface__["data"][0] if nbytes else 0, nbytes, None, None, array)


def _buffer(array: Any, writable: bool) -> Destination:
    try:
        view = memoryview(array)
    except TypeError:
        _refuse(array, "it has neither DLPack nor __cuda_array_interface__ nor the buffer protocol")
    except BufferError as error:
        _refuse(array, f"it gives no buffer: {error}")
    if writable and view.readonly:
        _refuse_read_only(array)
    if not view.c_contiguous:
        _refuse_layout(array)
    if "O" in view.format:
        _refuse(array, "its elements are Python objects, not bytes")
    # The view is kept: while it lives, a bytearray cannot be resized away under the read.
    if not view.nbytes:
        address = 0
    elif view.readonly:
        address = np.frombuffer(view.cast("B"), np.uint8).__array_interface__["data"][0]
    else:
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    return Destination(address, view.nbytes, None, None, (array, view))


def _torch(array: Any, torch: Any, stream: Any) -> Destination:
    kind = array.device.type
    if kind not in ("cpu", "cuda"):
        _refuse(array, f"it is on the device {kind!r}; only cpu and cuda tensors can be filled")
    if array.layout != torch.strided or array.is_quantized:
        _refuse(array, f"its layout is {array.layout}; only plain strided tensors can be filled")
    if not array.is_contiguous():
        _refuse_layout(array)
    if array.is_conj() or array.is_neg():
        _refuse(array, "it is a lazily conjugated or negated view; call resolve_conj() and resolve_neg() first")
    nbytes = array.numel() * array.element_size()
    address = array.data_ptr() if nbytes else 0
    if nbytes and not address:
        _refuse(array, "it has no memory of its own (a fake or wrapped tensor)")
    if kind == "cpu":
        return Destination(address, nbytes, None, None, array)
    device = array.device.index
    handle = torch.cuda.current_stream(device).cuda_stream if stream is None else stream_handle(stream)
    return Destination(address, nbytes, device, handle, array)


def stream_handle(stream: Any) -> int:
    """Return the integer handle of a CUDA stream: an int, or an object of CuPy, torch, numba or cuda.core."""
    if hasattr(stream, "__cuda_stream__"):
        stream = stream.__cuda_stream__()[1]
    else:
        for name in ("cuda_stream", "ptr", "handle"):
            if hasattr(stream, name):
                stream = getattr(stream, name)
                break
    if isinstance(stream, ctypes.c_void_p):
        stream = stream.value or 0
    try:
        handle = -1 if isinstance(stream, bool) else operator.index(stream)
    except TypeError:
        handle = -1
    if handle < 0:
        raise ValueError(f"stream={stream!r} is no CUDA stream: give its integer handle, or a stream object")
    return handle


def _device_stream(array: Any, device: int, stream: Any) -> int:
    """Return the given stream's handle, else CuPy's current one for CuPy arrays, else the array's own, else 0."""
    if stream is not None:
        return stream_handle(stream)
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(array, cupy.ndarray):
        return int(cupy.cuda.get_current_stream(device).ptr)
    own = getattr(array, "__cuda_array_interface__", {}).get("stream")
    return 0 if own is None else int(own)


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    )


_capsule_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_capsule_is_valid.restype = ctypes.c_int
_capsule_is_valid.argtypes = (ctypes.py_object, ctypes.c_char_p)
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)


def _dlpack(array: Any, stream: Any, writable: bool) -> Destination:
    kind, ordinal = (int(value) for value in array.__dlpack_device__())
    if kind == _DL_CUDA_MANAGED:
        _refuse_managed(array)
    if kind not in (_DL_CPU, _DL_CUDA, _DL_CUDA_HOST):
        _refuse(array, f"it is on a device of DLPack type {kind}; only host and CUDA memory can be filled")
    capsule = _capsule(array, kind)
    # The capsule is never renamed, hence never consumed: it releases the tensor itself when it is let go.
    flags = 0
    if _capsule_is_valid(capsule, b"dltensor_versioned"):
        versioned = _DLManagedTensorVersioned.from_address(_capsule_pointer(capsule, b"dltensor_versioned"))
        if versioned.major != 1:
            _refuse(array, f"it speaks DLPack {versioned.major}.{versioned.minor}; 1.x and older are understood")
        flags, tensor = versioned.flags, versioned.tensor
    elif _capsule_is_valid(capsule, b"dltensor"):
        tensor = _DLManagedTensor.from_address(_capsule_pointer(capsule, b"dltensor")).tensor
    else:
        _refuse(array, "__dlpack__ gave no DLPack capsule, or one that was used already")
    if writable and flags & _DL_READ_ONLY:
        _refuse_read_only(array)
    if writable and flags & _DL_IS_COPIED:
        _refuse(array, "__dlpack__ gave a copy: what is read would never reach the array")
    if tensor.device_type == _DL_CUDA_MANAGED:
        _refuse_managed(array)
    shape = tensor.shape[: tensor.ndim] if tensor.ndim else []
    count = 1
    for extent in shape:
        count *= extent
    strides = tensor.strides[: tensor.ndim] if tensor.ndim and tensor.strides else None
    if count and strides is not None and not _is_c_contiguous(shape, strides, 1):
        _refuse_layout(array)
    bits = tensor.bits * tensor.lanes
    if flags & _DL_SUBBYTE_PADDED:
        bits = max(bits, 8)
    nbytes = (count * bits + 7) // 8
    address = (tensor.data or 0) + tensor.byte_offset if nbytes else 0
    if nbytes and not tensor.data:
        _refuse(array, "its data pointer is null")
    keepalive = (array, capsule)
    if kind != _DL_CUDA:
        return Destination(address, nbytes, None, None, keepalive)
    return Destination(address, nbytes, ordinal, _device_stream(array, ordinal, stream), keepalive)


def _capsule(array: Any, kind: int) -> Any:
    # -1: the producer must not synchronise; the read itself is ordered behind the stream.
    arguments = {"stream": -1} if kind == _DL_CUDA else {}
    try:
        try:
            return array.__dlpack__(**arguments, max_version=(1, 0))
        except TypeError:
            return array.__dlpack__(**arguments)  # a producer older than DLPack 1.0
    except (BufferError, TypeError, ValueError) as error:
        raise ArrayError(f"cannot read into {type(array).__qualname__}: its __dlpack__ refused: {error}") from error


def _is_c_contiguous(shape: list[int], strides: list[int], itemsize: int) -> bool:
    expected = itemsize
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != expected:
            return False
        expected *= extent
    return True


def _cuda_array_interface(array: Any, stream: Any, writable: bool) -> Destination:
    # numba's interface for CUDA arrays, version 3.
    interface = array.__cuda_array_interface__
    if interface.get("mask") is not None:
        _refuse(array, "it has a mask; read into the plain array behind it")
    address, read_only = interface["data"]
    if writable and read_only:
        _refuse_read_only(array)
    try:
        dtype = np.dtype(interface["typestr"])
    except TypeError:
        _refuse(array, f"its typestr {interface['typestr']!r} is unknown")
    if dtype.hasobject or dtype.itemsize == 0:
        _refuse(array, f"its typestr {interface['typestr']!r} has no size in bytes")
    shape = [int(extent) for extent in interface["shape"]]
    nbytes = dtype.itemsize
    for extent in shape:
        nbytes *= extent
    strides = interface.get("strides")
    if nbytes and strides is not None and not _is_c_contiguous(shape, list(strides), dtype.itemsize):
        _refuse_layout(array)
    if not nbytes:
        return Destination(0, 0, None, None, array)
    if not address:
        _refuse(array, "its data pointer is null")
    device = _pointer_device(array, int(address))
    return Destination(int(address), nbytes, device, _device_stream(array, device, stream), array)


def _pointer_device(array: Any, address: int) -> int:
    """Ask the driver on which device ``address`` is: the interface does not say."""
    from xds.engine import cuda  # loads the native core, which host arrays never need

    known = cuda.pointer(address)
    if known is None:
        count, reason = cuda.device_count()
        if count == 0:
            _refuse(array, f"it claims to be CUDA memory, but there is no usable CUDA driver ({reason})")
        _refuse(array, f"the CUDA driver does not know its pointer {address:#x}")
    if known.managed:
        _refuse_managed(array)
    if known.device is None:
        _refuse(array, f"its pointer {address:#x} is not device memory")
    return known.device
