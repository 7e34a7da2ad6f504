"""runai-model-streamer#43: zero-size tensors of an fp8 checkpoint made the streamer hang. They are yielded."""

from __future__ import annotations

import ml_dtypes
import pytest
from checkpoint_files import noise, write

import xds


@pytest.mark.timeout(30)
def test_zero_size_tensors_are_yielded(tmp_path):
    content = {
        "first": ("F8_E4M3", (0, 128), b""),
        "weight": ("F8_E4M3", (16, 8), noise(128)),
        "middle": ("F8_E5M2", (0,), b""),
        "scale": ("F32", (1,), noise(4)),
        "last": ("F8_E4M3", (4, 0), b""),
    }
    path = write(tmp_path / "m.safetensors", content)
    with xds.open_checkpoint(path) as checkpoint:
        streamed = dict(checkpoint.stream(device="cpu"))
    assert streamed.keys() == content.keys()
    for name, (_, shape, data) in content.items():
        assert streamed[name].shape == shape
        assert streamed[name].tobytes() == data
    assert streamed["first"].dtype == ml_dtypes.float8_e4m3fn


@pytest.mark.timeout(30)
def test_nothing_but_zero_size_tensors(tmp_path):
    path = write(tmp_path / "m.safetensors", {"a": ("F8_E4M3", (0,), b""), "b": ("F32", (3, 0), b"")})
    loaded = xds.load(path, device="cpu")
    assert {name: array.shape for name, array in loaded.items()} == {"a": (0,), "b": (3, 0)}
