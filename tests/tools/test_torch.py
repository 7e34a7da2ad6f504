"""``torch.load`` and ``torch.save`` with open files of ``xds://``."""

from __future__ import annotations

import zipfile

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture
def state():
    generator = torch.Generator().manual_seed(3)
    return {
        "weight": torch.randn(300, 1000, generator=generator),
        "half": torch.arange(1000).to(torch.bfloat16),
        "step": torch.tensor(7),
        "name": "ü",
    }


def same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]) if torch.is_tensor(value) else value == other[name]


@pytest.mark.parametrize("weights_only", [True, False])
def test_load(fs, tmp_path, state, moves, weights_only):
    torch.save(state, tmp_path / "model.pt")
    with moves(1200000), fs.open(str(tmp_path / "model.pt")) as file:
        same(torch.load(file, weights_only=weights_only), state)


def test_load_of_the_old_format(fs, tmp_path, state, moves):
    torch.save(state, tmp_path / "model.pt", _use_new_zipfile_serialization=False)
    with moves(1200000), fs.open(str(tmp_path / "model.pt")) as file:
        same(torch.load(file, weights_only=True), state)


def test_load_beyond_4_gib(fs, tmp_path, state, moves):
    """Whoever keeps an offset in 32 bits fails here: the tensors lie behind a hole of 5 GiB."""
    torch.save(state, tmp_path / "small.pt")
    with zipfile.ZipFile(tmp_path / "small.pt") as small, zipfile.ZipFile(tmp_path / "large.pt", "w") as large:
        names = sorted(small.namelist(), key=lambda name: "/data/" in name)
        hole = 5 << 30
        for name in names:
            if "/data/" in name and hole:
                large.start_dir += hole
                hole = 0
            large.fp.seek(large.start_dir)
            large.writestr(name, small.read(name))
    size = (tmp_path / "large.pt").stat().st_size
    assert size > 5 << 30
    with moves(1200000), fs.open(str(tmp_path / "large.pt")) as file:
        assert file.size == size
        same(torch.load(file, weights_only=True), state)


def test_save(fs, tmp_path, state, moves):
    with moves(1200000, "write"), fs.open(str(tmp_path / "saved.pt"), "wb") as file:
        torch.save(state, file)
    same(torch.load(tmp_path / "saved.pt", weights_only=True), state)


def test_a_save_that_is_interrupted_leaves_the_old_file(fs, tmp_path, state):
    torch.save({"old": torch.ones(3)}, tmp_path / "model.pt")

    def save():
        with fs.open(str(tmp_path / "model.pt"), "wb") as file:
            torch.save(state, file)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save()
    same(torch.load(tmp_path / "model.pt", weights_only=True), {"old": torch.ones(3)})
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


def test_a_save_in_a_transaction_that_fails_leaves_the_old_file(fs, tmp_path, state):
    torch.save({"old": torch.ones(3)}, tmp_path / "model.pt")

    def save():
        with fs.transaction, fs.open(str(tmp_path / "model.pt"), "wb") as file:
            torch.save(state, file)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        save()
    same(torch.load(tmp_path / "model.pt", weights_only=True), {"old": torch.ones(3)})
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]
    with fs.transaction, fs.open(str(tmp_path / "model.pt"), "wb") as file:
        torch.save(state, file)
    same(torch.load(tmp_path / "model.pt", weights_only=True), state)
