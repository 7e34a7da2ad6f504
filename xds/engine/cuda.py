"""What the native core knows of the CUDA driver: devices, memory, pointers. Layer: engine; no CuPy, no torch."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

from xds.errors import DeviceError, ForkedProcessError
from xds.native import function

_CU_MEMORYTYPE_DEVICE = 2
_CUDA_ERROR_NOT_INITIALIZED = 3

_FORKED = (
    "this process was forked after its parent used the GPU, and CUDA does not survive a fork; "
    "start workers with the spawn or forkserver method, or read into host arrays here"
)


class _Use:
    """Whether this process, or the one that it was forked from, has initialised the driver."""

    here = False
    inherited = False

    @classmethod
    def after_fork(cls) -> None:
        cls.inherited = cls.inherited or cls.here
        cls.here = False


os.register_at_fork(after_in_child=_Use.after_fork)


@dataclass(frozen=True, slots=True)
class Pointer:
    """What an address is: the device that owns it, or ``None`` for host memory, and whether it is managed."""

    device: int | None
    managed: bool


def check_not_forked() -> None:
    """Raise ForkedProcessError in a child of a process that used the GPU."""
    if _Use.inherited:
        raise ForkedProcessError(_FORKED)


def device_count() -> tuple[int, str]:
    """Return the number of usable CUDA devices, and why there is none (none after a fork of a user of the GPU)."""
    if _Use.inherited:
        return 0, _FORKED
    text = ctypes.create_string_buffer(256)
    count = function("xds_cuda_device_count", ctypes.c_int32, ctypes.c_char_p, ctypes.c_size_t)(text, len(text))
    reason = text.value.decode(errors="replace")
    if count:
        _Use.here = True
    elif "CUDA_ERROR_NOT_INITIALIZED" in reason:
        # Somebody else (CuPy, torch) used the GPU before the fork: only then does the driver refuse to start so.
        _Use.inherited = True
        reason = _FORKED
    return count, reason


def device_name(device: int) -> tuple[str, int]:
    """Return a device's name and the driver's CUDA version (1000 * major + 10 * minor)."""
    name = ctypes.create_string_buffer(256)
    version = ctypes.c_int32()
    call = function(
        "xds_cuda_device_name",
        ctypes.c_int32,
        ctypes.c_int32,
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.POINTER(ctypes.c_int32),
    )
    code = call(device, name, len(name), ctypes.byref(version))
    if code:
        raise DeviceError(f"CUDA device {device}: the driver answered error {code}")
    return name.value.decode(errors="replace"), version.value


def memory(device: int) -> tuple[int, int]:
    """Return free and total bytes of a device's memory."""
    free, total = ctypes.c_uint64(), ctypes.c_uint64()
    pointer = ctypes.POINTER(ctypes.c_uint64)
    code = function("xds_cuda_memory", ctypes.c_int32, ctypes.c_int32, pointer, pointer)(
        device, ctypes.byref(free), ctypes.byref(total)
    )
    if code:
        raise DeviceError(f"CUDA device {device}: cuMemGetInfo answered error {code}")
    return free.value, total.value


def pointer(address: int) -> Pointer | None:
    """Return what the driver knows of an address; ``None`` where it knows nothing (ordinary host memory).

    Raises:
        ForkedProcessError: in a child of a process that used the GPU.
    """
    check_not_forked()
    device, kind, managed = ctypes.c_int32(), ctypes.c_int32(), ctypes.c_int32()
    ints = ctypes.POINTER(ctypes.c_int32)
    call = function("xds_cuda_pointer", ctypes.c_int32, ctypes.c_uint64, ints, ints, ints)
    code = call(address, ctypes.byref(device), ctypes.byref(kind), ctypes.byref(managed))
    if code == _CUDA_ERROR_NOT_INITIALIZED:
        raise ForkedProcessError(_FORKED)
    if code:
        return None
    _Use.here = True
    return Pointer(device.value if kind.value == _CU_MEMORYTYPE_DEVICE else None, bool(managed.value))


def cufile_proved(fd: int, device: int) -> tuple[bool, str]:
    """Return whether reads of a file into a device were proved to be real DMA through cuFile, and why (not)."""
    text = ctypes.create_string_buffer(256)
    call = function(
        "xds_cufile_proved", ctypes.c_int32, ctypes.c_int32, ctypes.c_int32, ctypes.c_char_p, ctypes.c_size_t
    )
    proved = call(fd, device, text, len(text))
    return bool(proved), text.value.decode(errors="replace")
