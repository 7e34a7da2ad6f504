"""Loads the native core (one shared library, flat C ABI) by ctypes. Layer: native; imports nothing of ours but errors.

Each function is declared where it is used: :func:`function` gives it with its C types.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.resources
from pathlib import Path
from typing import Any

ABI_VERSION = 1


def _candidates() -> list[Path]:
    found = [Path(str(importlib.resources.files(__name__) / "libxds_native.so"))]
    # An editable install keeps the sources here and the built library in site-packages.
    found += [Path(entry) / "libxds_native.so" for entry in __path__]
    return found


@functools.cache
def library() -> ctypes.CDLL:
    """Return the shared library; raises ImportError that says how to build it."""
    candidates = _candidates()
    for path in candidates:
        if path.is_file():
            loaded = ctypes.CDLL(str(path))
            version = loaded.xds_abi_version()
            if version != ABI_VERSION:
                raise ImportError(
                    f"{path} has ABI version {version}, this package needs {ABI_VERSION}; install the package again"
                )
            return loaded
    raise ImportError(
        "the native core libxds_native.so is missing (looked in "
        + ", ".join(str(path.parent) for path in candidates)
        + "); install the package with `pip install .`, or a wheel made by tools/build-wheel"
    )


def function(name: str, restype: Any, *argtypes: Any) -> Any:
    """Return the C function ``name`` with its types set; calls release the interpreter lock."""
    symbol = getattr(library(), name)
    symbol.restype = restype
    symbol.argtypes = argtypes
    return symbol
