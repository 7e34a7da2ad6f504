"""ServerlessLLM#322: an empty data file was taken for a saved model. It is refused."""

from __future__ import annotations

import pytest
from checkpoint_files import write, write_index

import xds
from xds.errors import TruncatedError


def test_an_empty_file(tmp_path):
    (tmp_path / "m.safetensors").touch()
    with pytest.raises(TruncatedError, match=r"m\.safetensors.*at least 8 bytes.*has 0"):
        xds.load(tmp_path / "m.safetensors", device="cpu")


def test_an_empty_shard(tmp_path):
    write(tmp_path / "a.safetensors", {"a": ("U8", (1,), b"x")})
    (tmp_path / "b.safetensors").touch()
    write_index(tmp_path, {"a": "a.safetensors", "b": "b.safetensors"})
    with pytest.raises(TruncatedError, match=r"b\.safetensors.*has 0"):
        xds.load(tmp_path, device="cpu")
