"""pytorch#144752: a checkpoint writer called fsync on files that have no descriptor, and crashed."""

from __future__ import annotations

import io
import os

import pytest


@pytest.mark.parametrize("mode", ["rb", "wb", "ab", "r+b", "xb"])
def test_fileno_is_refused_as_python_does(fs, tmp_path, mode):
    path = tmp_path / "f"
    if mode != "xb":
        path.write_bytes(b"x")
    with fs.open(str(path), mode) as file:
        with pytest.raises(io.UnsupportedOperation):
            file.fileno()
        # What the writer catches.
        with pytest.raises((AttributeError, io.UnsupportedOperation)):
            os.fsync(file.fileno())
        assert not file.isatty()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_distributed_checkpoints_are_saved_and_loaded(tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    checkpoint = pytest.importorskip("torch.distributed.checkpoint", reason="this torch has no distributed package")
    module = pytest.importorskip("torch.distributed.checkpoint._fsspec_filesystem", reason="this torch has no fsspec")
    state = {"a": torch.arange(1000, dtype=torch.float32), "b": {"c": torch.ones(3, 4)}}
    for sync_files in (False, True):
        url = f"xds://{tmp_path}/checkpoint{sync_files}"
        checkpoint.save(state, storage_writer=module.FsspecWriter(url, sync_files=sync_files), no_dist=True)
    loaded = {"a": torch.zeros(1000), "b": {"c": torch.zeros(3, 4)}}
    checkpoint.load(loaded, storage_reader=module.FsspecReader(url), no_dist=True)
    assert torch.equal(loaded["a"], state["a"])
    assert torch.equal(loaded["b"]["c"], state["b"]["c"])
