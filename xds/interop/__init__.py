"""Arrays of NumPy, CuPy, torch and JAX over memory that XDS fills. Layer: interop, below checkpoint.

Importing this imports no framework; :func:`framework` imports the one that is asked for.
"""

from __future__ import annotations

import functools
import importlib

from xds.interop.base import Block, Framework
from xds.interop.devices import resolve

__all__ = ["Block", "Framework", "framework", "resolve"]

_CLASSES = {
    "numpy": "xds.interop.numpy_arrays:NumpyFramework",
    "cupy": "xds.interop.cupy_arrays:CupyFramework",
    "torch": "xds.interop.torch_tensors:TorchFramework",
    "jax": "xds.interop.jax_arrays:JaxFramework",
}


@functools.cache
def framework(name: str) -> Framework:
    """Return the framework ``name`` (numpy, cupy, torch, jax); raises ImportError where it is not installed."""
    module, _, cls = _CLASSES[name].partition(":")
    try:
        found: Framework = getattr(importlib.import_module(module), cls)()
    except ModuleNotFoundError as error:
        raise ImportError(f"arrays of {name} were asked for, and {error.name} is not installed") from error
    return found
