"""huggingface_hub#1388 (also onnxruntime#27353, transformers#46611).

Snapshot files are relative links into blobs. They are followed; siblings lie beside the link.
"""

from __future__ import annotations

import os

import pytest
from checkpoint_files import write, write_index

import xds


@pytest.fixture
def snapshot(tmp_path):
    cache = tmp_path / "models--org--name"
    blobs, folder = cache / "blobs", cache / "snapshots" / "5c0f"
    blobs.mkdir(parents=True)
    folder.mkdir(parents=True)
    weight_map: dict[str, object] = {}
    for number in (1, 2):
        name = f"model-0000{number}-of-00002.safetensors"
        write(blobs / f"{number:064x}", {f"t{number}": ("U8", (3,), bytes([number] * 3))})
        (folder / name).symlink_to(os.path.relpath(blobs / f"{number:064x}", folder))
        weight_map[f"t{number}"] = name
    write_index(blobs, weight_map, "aaaa")
    (folder / "model.safetensors.index.json").symlink_to("../../blobs/aaaa")
    return folder


@pytest.mark.parametrize("what", ["", "/model.safetensors.index.json"])
def test_a_snapshot_of_links(snapshot, what):
    loaded = xds.load(f"xds://{snapshot}{what}", device="cpu")
    assert {name: array.tolist() for name, array in loaded.items()} == {"t1": [1] * 3, "t2": [2] * 3}


def test_one_link(snapshot):
    loaded = xds.load(snapshot / "model-00002-of-00002.safetensors", device="cpu")
    assert loaded["t2"].tolist() == [2] * 3


def test_a_link_to_the_snapshot(snapshot, tmp_path):
    (tmp_path / "latest").symlink_to(snapshot)
    assert set(xds.load(tmp_path / "latest", device="cpu")) == {"t1", "t2"}
