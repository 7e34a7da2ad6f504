"""Loading checkpoints: safetensors files, sharded or not, into arrays. Layer: checkpoint, over the file system."""

from __future__ import annotations

from xds.checkpoint.loader import Checkpoint, LoadResult, load, open_checkpoint
from xds.checkpoint.selection import TensorInfo, TensorNotFoundError

__all__ = ["Checkpoint", "LoadResult", "TensorInfo", "TensorNotFoundError", "load", "open_checkpoint"]
