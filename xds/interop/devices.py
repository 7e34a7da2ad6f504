"""Which device and which framework a load means. Layer: interop; imports a framework only where it is asked for."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from xds.engine import cuda
from xds.errors import ArgumentError, DeviceError

FRAMEWORKS = ("numpy", "cupy", "torch", "jax")


def gpu_count() -> int:
    """Return how many CUDA devices this process can use; 0 without a driver, and after a fork of a user of the GPU."""
    return cuda.device_count()[0]


def resolve(device: object, framework: str | None) -> tuple[int | None, str]:
    """Return (CUDA ordinal or ``None`` for host memory, framework name).

    Args:
        device: ``None`` (a GPU if there is one that the framework can use, else the host), ``"cpu"``, ``"cuda"``,
            ``"cuda:N"``, an ordinal, or anything whose ``str`` is one of these (``torch.device``).
        framework: ``None`` (GPU: torch if it is imported, else CuPy; host: NumPy) or one of :data:`FRAMEWORKS`.

    Raises:
        ArgumentError: a device or framework that is none, or that do not go together.
        DeviceError: a CUDA device that is not there.
        ForkedProcessError: a CUDA device, in a process forked after its parent used the GPU.
    """
    if framework is not None and framework not in FRAMEWORKS:
        raise ArgumentError(f"framework={framework!r} is none of {', '.join(FRAMEWORKS)}")
    ordinal = _ordinal(device, framework)
    if framework is None:
        framework = _default_framework(ordinal)
    if ordinal is None and framework == "cupy":
        raise ArgumentError("CuPy arrays live in GPU memory: device='cpu' needs framework 'numpy', 'torch' or 'jax'")
    if ordinal is not None and framework == "numpy":
        raise ArgumentError("NumPy arrays live in host memory: a CUDA device needs framework 'cupy', 'torch' or 'jax'")
    return ordinal, framework


def _ordinal(device: object, framework: str | None) -> int | None:
    if device is None:
        return _current() if gpu_count() and framework != "numpy" and _has_cuda(framework) else None
    if isinstance(device, bool):
        raise ArgumentError(f"device={device!r} is no device; expected None, 'cpu', 'cuda', 'cuda:N' or an ordinal")
    text = f"cuda:{device}" if isinstance(device, int) else str(device)
    if text == "cpu":
        return None
    kind, colon, index = text.partition(":")
    if kind != "cuda" or (colon and not (index.isascii() and index.isdigit())):
        raise ArgumentError(f"device={device!r} is no device; expected None, 'cpu', 'cuda', 'cuda:N' or an ordinal")
    count = gpu_count()
    if count == 0:
        cuda.check_not_forked()
        raise DeviceError(
            f"device={device!r}: no CUDA GPU on this machine (or no driver); device='cpu' loads into host memory"
        )
    if not _has_cuda(framework):
        raise DeviceError(f"device={device!r}: the installed {framework} is built without CUDA, or finds no GPU")
    ordinal = int(index) if colon else _current()
    if ordinal >= count:
        raise DeviceError(f"device={device!r}: the driver shows {count} CUDA devices, 0 to {count - 1}")
    return ordinal


def _torch_cuda() -> Any:
    torch: Any = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_available() else None


def _has_cuda(framework: str | None) -> bool:
    """Whether a framework that comes with and without CUDA has it; ``True`` for the others."""
    if framework not in ("torch", "jax"):
        return True
    try:
        found: Any = importlib.import_module(framework)
    except ModuleNotFoundError as error:
        raise ImportError(f"arrays of {framework} were asked for, and {error.name} is not installed") from error
    if framework == "torch":
        return bool(found.cuda.is_available())
    try:
        return len(found.devices("gpu")) > 0
    except RuntimeError:
        return False


def _current() -> int:
    torch = _torch_cuda()
    if torch is not None:
        return int(torch.cuda.current_device())
    cupy: Any = sys.modules.get("cupy")
    return int(cupy.cuda.runtime.getDevice()) if cupy is not None else 0


def _default_framework(ordinal: int | None) -> str:
    if ordinal is None:
        return "numpy"
    if _torch_cuda() is not None:
        return "torch"
    if importlib.util.find_spec("cupy") is None:
        raise DeviceError(
            "there is a CUDA GPU, but no CuPy to make arrays in its memory: `pip install cupy-cuda13x` (cupy-cuda12x "
            "for older drivers), or import torch before, or pass framework='torch', or device='cpu'"
        )
    return "cupy"
