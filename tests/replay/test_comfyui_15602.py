"""ComfyUI#15602.

Trailing bytes were refused by one way of loading and accepted by another. Here: one rule, refused.
"""

from __future__ import annotations

import pytest
from checkpoint_files import write, write_index

import xds
from xds.errors import CheckpointError

WAYS = {
    "load": lambda path: xds.load(path, device="cpu"),
    "names": lambda path: xds.load(path, device="cpu", names=["a"]),
    "folder": lambda path: xds.load(path.parent, device="cpu"),
    "not strict": lambda path: xds.load(path.parent, device="cpu", strict=False),
    "open": xds.open_checkpoint,
}


@pytest.mark.parametrize("way", WAYS)
def test_trailing_bytes(tmp_path, way):
    path = write(tmp_path / "m.safetensors", {"a": ("U8", (2,), b"xy")})
    write_index(tmp_path, {"a": path.name})
    with path.open("ab") as file:
        file.write(b"12345")
    with pytest.raises(CheckpointError, match="5 trailing bytes"):
        WAYS[way](path)
