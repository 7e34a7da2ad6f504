"""torch's distributed checkpoints through ``FsspecReader`` and ``FsspecWriter``."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
dcp = pytest.importorskip("torch.distributed.checkpoint", reason="this torch has no distributed checkpoints")
fsspec_io = pytest.importorskip(
    "torch.distributed.checkpoint._fsspec_filesystem", reason="this torch does not save through fsspec"
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture
def state():
    generator = torch.Generator().manual_seed(5)
    return {f"layer.{number}": torch.randn(100, 500, generator=generator) for number in range(6)} | {"step": 3}


def empty(state):
    return {name: torch.zeros_like(value) if torch.is_tensor(value) else None for name, value in state.items()}


def same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]) if torch.is_tensor(value) else value == other[name]


def test_reading(tmp_path, state, moves):
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "saved"), no_dist=True)
    got, expected = empty(state), empty(state)
    with moves(1200000):
        dcp.load(got, storage_reader=fsspec_io.FsspecReader(f"xds://{tmp_path}/saved"), no_dist=True)
    dcp.load(expected, storage_reader=dcp.FileSystemReader(tmp_path / "saved"), no_dist=True)
    same(got, expected)
    same(got, state)


def test_writing(tmp_path, state, moves):
    with moves(1200000, "write"):
        dcp.save(state, storage_writer=fsspec_io.FsspecWriter(f"xds://{tmp_path}/saved"), no_dist=True)
    got = empty(state)
    dcp.load(got, storage_reader=dcp.FileSystemReader(tmp_path / "saved"), no_dist=True)
    same(got, state)
    # Once more over what is there.
    dcp.save(state, storage_writer=fsspec_io.FsspecWriter(f"xds://{tmp_path}/saved", overwrite=True), no_dist=True)
    again = empty(state)
    dcp.load(again, storage_reader=fsspec_io.FsspecReader(f"xds://{tmp_path}/saved"), no_dist=True)
    same(again, state)
