"""InstantTensor#6 (also vllm#1696, safetensors#380, transformers#36580).

Scalars broke loading. They come as 0-d arrays.
"""

from __future__ import annotations

import numpy as np
import pytest
from checkpoint_files import write

import xds

CONTENT = {
    "step": ("I64", (), np.int64(1234).tobytes()),
    "scale": ("F32", (), np.float32(0.5).tobytes()),
    "flag": ("BOOL", (), b"\1"),
}


def test_scalars(tmp_path):
    loaded = xds.load(write(tmp_path / "m.safetensors", CONTENT), device="cpu")
    assert {name: (array.shape, array[()]) for name, array in loaded.items()} == {
        "step": ((), 1234),
        "scale": ((), 0.5),
        "flag": ((), True),
    }


def test_torch_scalars(tmp_path):
    pytest.importorskip("torch", reason="torch is not installed")
    loaded = xds.load(write(tmp_path / "m.safetensors", CONTENT), device="cpu", framework="torch")
    assert {name: tensor.item() for name, tensor in loaded.items()} == {"step": 1234, "scale": 0.5, "flag": True}
