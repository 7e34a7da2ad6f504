"""safetensors#601: a file of metadata alone came out corrupt. It is valid and empty."""

from __future__ import annotations

from checkpoint_files import write

import xds


def test_metadata_alone(tmp_path):
    path = write(tmp_path / "m.safetensors", {}, metadata={"format": "pt", "note": "no tensor"})
    loaded = xds.load(path, device="cpu")
    assert loaded == {}
    assert loaded.metadata == {"format": "pt", "note": "no tensor"}
    assert loaded.report.nbytes == 0
    with xds.open_checkpoint(path) as checkpoint:
        assert list(checkpoint.stream(device="cpu")) == []
