"""XDS: storage reads that land straight in GPU memory, behind ordinary fsspec URLs.

Names are imported when they are first used: ``import xds`` loads neither CuPy nor torch nor the native core.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xds import errors as errors
    from xds.checkpoint import load as load
    from xds.checkpoint import open_checkpoint as open_checkpoint
    from xds.filesystem import XdsFileSystem as XdsFileSystem
    from xds.observe import Complete as Complete
    from xds.observe import Failed as Failed
    from xds.observe import Started as Started
    from xds.observe import collect as collect
    from xds.observe import trace as trace
    from xds.observe import trace_nvtx as trace_nvtx
    from xds.report import ReadReport as ReadReport

    __version__: str

__all__ = [
    "Complete",
    "Failed",
    "ReadReport",
    "Started",
    "XdsFileSystem",
    "__version__",
    "close",
    "collect",
    "errors",
    "load",
    "open_checkpoint",
    "stats",
    "trace",
    "trace_nvtx",
]

_HOMES = {
    "Complete": "xds.observe",
    "Failed": "xds.observe",
    "ReadReport": "xds.report",
    "Started": "xds.observe",
    "XdsFileSystem": "xds.filesystem",
    "collect": "xds.observe",
    "load": "xds.checkpoint",
    "open_checkpoint": "xds.checkpoint",
    "trace": "xds.observe",
    "trace_nvtx": "xds.observe",
}


def stats() -> dict[str, Any]:
    """Return the sums of this process: reads, their bytes by posting, placement and method; writes, errors."""
    from xds.report import TOTALS

    return TOTALS.snapshot()


def close() -> None:
    """Free the pinned ring and the threads of this process; the next read makes them anew. Twice is fine."""
    from xds import pool

    pool.close()


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    elif name == "errors":
        value = importlib.import_module("xds.errors")
    elif name == "__version__":
        from importlib.metadata import version

        value = version("xpu-direct-storage")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
