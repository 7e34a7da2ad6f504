"""GPU and driver (through libcuda alone), CuPy, torch, cuFile. Layer: top, part of the doctor."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from xds.doctor import Finding, State, read_text

_COMPUTE_MAJOR, _COMPUTE_MINOR = 75, 76


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU as the driver shows it."""

    name: str
    nbytes: int
    compute: str


@dataclass(frozen=True, slots=True)
class Driver:
    """What libcuda says.

    Attributes:
        version: the newest CUDA version it serves, as (13, 0), or ``None`` without a driver.
        devices: usable GPUs.
        fault: why there is none.
    """

    version: tuple[int, int] | None = None
    devices: tuple[Device, ...] = ()
    fault: str = ""


@functools.cache
def driver(library: str | None = None) -> Driver:
    """Ask libcuda (or what ``XDS_CUDA_LIBRARY`` names) for its version and its devices; makes no context."""
    library = library or os.environ.get("XDS_CUDA_LIBRARY") or "libcuda.so.1"
    try:
        cuda = ctypes.CDLL(library)
    except OSError:
        return Driver(fault=f"{library} is not installed")
    number = ctypes.c_int(0)
    version = None
    if cuda.cuDriverGetVersion(ctypes.byref(number)) == 0 and number.value:
        version = number.value // 1000, number.value % 1000 // 10
    code = cuda.cuInit(0)
    if code:
        text = ctypes.c_char_p()
        known = cuda.cuGetErrorName(code, ctypes.byref(text)) == 0 and text.value
        return Driver(version, fault=f"cuInit failed: {text.value.decode() if known and text.value else code}")
    count = ctypes.c_int(0)
    if cuda.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return Driver(version, fault="the driver shows no GPU")
    devices = []
    for ordinal in range(count.value):
        handle, name, nbytes = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t()
        major, minor = ctypes.c_int(), ctypes.c_int()
        if cuda.cuDeviceGet(ctypes.byref(handle), ordinal):
            continue
        cuda.cuDeviceGetName(name, len(name), handle)
        cuda.cuDeviceTotalMem_v2(ctypes.byref(nbytes), handle)
        cuda.cuDeviceGetAttribute(ctypes.byref(major), _COMPUTE_MAJOR, handle)
        cuda.cuDeviceGetAttribute(ctypes.byref(minor), _COMPUTE_MINOR, handle)
        devices.append(Device(name.value.decode(errors="replace"), nbytes.value, f"{major.value}.{minor.value}"))
    return Driver(version, tuple(devices), "" if devices else "no GPU can be opened")


def gpu(root: Path) -> Sequence[Finding]:
    """The driver and each GPU."""
    found = driver()
    release = read_text(root / "sys/module/nvidia/version")
    text = f"driver {release}, " if release else ""
    text += f"CUDA {found.version[0]}.{found.version[1]}" if found.version else "no CUDA driver"
    if not found.devices:
        cost = "arrays are filled in host memory; nothing goes to a GPU"
        action = "install the NVIDIA driver, or start the container with its GPUs (--gpus all)"
        if found.version:
            action = "see `nvidia-smi`; check CUDA_VISIBLE_DEVICES and the container's devices"
        return [Finding("GPU", "absent", f"{found.fault} ({text})", cost, action)]
    shown = [
        f"cuda:{number} {device.name}, {device.nbytes / (1 << 30):.0f} GiB, compute {device.compute}"
        for number, device in enumerate(found.devices)
    ]
    if found.version and found.version < (12, 0):
        return [
            Finding(
                "GPU",
                "limited",
                f"{'; '.join(shown)} ({text})",
                "CuPy's wheels for CUDA 12 and 13 do not run with this driver",
                "install driver 525 or newer",
            )
        ]
    return [Finding("GPU", "ok", f"{'; '.join(shown)} ({text})")]


def _installed(*names: str) -> tuple[str, str] | None:
    """Return name and version of the first of the distributions that is installed."""
    for name in names:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def cupy(root: Path) -> Sequence[Finding]:
    """CuPy, and whether it is the one for this driver."""
    found = driver()
    fitting = "cupy-cuda13x" if found.version and found.version >= (13, 0) else "cupy-cuda12x"
    install = f"pip install {fitting}"
    have = _installed("cupy-cuda13x", "cupy-cuda12x", "cupy")
    if have is None:
        if importlib.util.find_spec("cupy") is not None:
            return [Finding("CuPy", "ok", "installed, of unknown version")]
        cost = "no CuPy arrays" if found.devices else "nothing: there is no GPU"
        return [Finding("CuPy", "absent", "not installed", cost, install if found.devices else "nothing")]
    name, version = have
    if name == "cupy-cuda13x" and found.version and found.version < (13, 0):
        what = f"{name} {version}, but the driver serves CUDA {found.version[0]}.{found.version[1]}"
        return [Finding("CuPy", "limited", what, "it cannot use the GPU", f"pip uninstall {name}; {install}")]
    return [Finding("CuPy", "ok", f"{name} {version}")]


def torch(root: Path) -> Sequence[Finding]:
    """PyTorch, and whether its build can use a GPU; it is not imported."""
    have = _installed("torch")
    if have is None:
        return [
            Finding(
                "torch",
                "absent",
                "not installed",
                "no torch tensors; NumPy and CuPy arrays do not need it",
                "pip install torch, if you want them",
            )
        ]
    version = have[1]
    if version.endswith("+cpu") and driver().devices:
        cost = "its tensors stay in host memory"
        return [Finding("torch", "limited", f"{version}, the CPU build", cost, "install a CUDA build of torch")]
    return [Finding("torch", "ok", version)]


def cufile_library() -> Path | str | None:
    """Return where libcufile is (a wheel's folder, or the loader's path), or ``None``."""
    for entry in sys.path:
        for pattern in ("nvidia/cufile/lib/libcufile.so.*", "nvidia/cu*/lib/libcufile.so.*"):
            for path in sorted(Path(entry or ".").glob(pattern)):
                return path
    for name in ("libcufile.so.0", "/usr/local/cuda/lib64/libcufile.so.0"):
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return name
    return None


def cufile(root: Path) -> Sequence[Finding]:
    """CuFile, and whether the kernel has what it needs for real DMA."""
    library = cufile_library()
    if not driver().devices:
        state: State = "limited" if library else "absent"
        return [Finding("cuFile", state, str(library or "not installed"), "nothing: there is no GPU")]
    cost = "reads go through the pinned ring (placement copy): one copy more, by the CPU"
    module = read_text(root / "proc/driver/nvidia-fs/version")
    loaded = module is not None or (root / "proc/driver/nvidia-fs").is_dir()
    if library is None:
        what = "not installed" + ("; nvidia-fs is loaded" if loaded else "")
        action = "install libcufile" if loaded else "nothing, unless your storage and driver support GPUDirect Storage"
        return [Finding("cuFile", "absent", what, cost, action)]
    if not loaded:
        return [
            Finding(
                "cuFile",
                "limited",
                f"{library}; no nvidia-fs module: compatibility mode, which is not used",
                cost,
                "load nvidia-fs if your storage supports GPUDirect Storage",
            )
        ]
    return [
        Finding(
            "cuFile",
            "limited",
            f"{library}; nvidia-fs {module or 'of unknown version'} is loaded",
            "used only for files where a test read proves real DMA; " + cost.replace("reads go", "others go"),
            "see placement in the report of a load: dma is cuFile",
        )
    ]
