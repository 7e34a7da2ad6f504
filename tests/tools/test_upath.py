"""universal_pathlib: ``UPath`` of ``xds://`` behaves as ``pathlib.Path`` does."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

upath = pytest.importorskip("upath", reason="universal_pathlib is not installed")

# It has no class for protocols that it does not know, and says so.
pytestmark = pytest.mark.filterwarnings("ignore:.*not explicitly implemented.*:UserWarning")


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "sub" / "deep").mkdir(parents=True)
    (tmp_path / "a.txt").write_text("line 1\nline 2\n")
    (tmp_path / "sub" / "b #?%20.txt").write_bytes(b"\x00\xff" * 1000)
    (tmp_path / "sub" / "deep" / "c.bin").write_bytes(b"c")
    return tmp_path


def both(tree):
    return upath.UPath(f"xds://{tree}"), Path(tree)


def test_names(tree):
    ours, plain = both(tree)
    assert (ours / "sub" / "x.tar.gz").suffixes == (plain / "sub" / "x.tar.gz").suffixes
    assert (ours / "sub").parent == ours
    assert (ours / "a.txt").name == "a.txt"
    assert str(ours / "a.txt") == f"xds://{tree}/a.txt"
    assert ours.protocol == "xds"


def test_looking(tree):
    ours, plain = both(tree)
    for name in ("a.txt", "sub", "nothing", "sub/b #?%20.txt"):
        one, other = ours / name, plain / name
        assert (one.exists(), one.is_file(), one.is_dir()) == (other.exists(), other.is_file(), other.is_dir())
    assert (ours / "a.txt").stat().st_size == 14
    assert (ours / "a.txt").stat().st_mtime == pytest.approx((plain / "a.txt").stat().st_mtime)
    assert sorted(path.name for path in ours.iterdir()) == sorted(path.name for path in plain.iterdir())
    assert sorted(path.path for path in ours.glob("**/*.txt")) == sorted(map(str, plain.glob("**/*.txt")))
    assert sorted(path.path for path in ours.rglob("*.bin")) == sorted(map(str, plain.rglob("*.bin")))


def test_reading(tree, moves):
    ours, plain = both(tree)
    with moves(2014):
        assert (ours / "sub" / "b #?%20.txt").read_bytes() == (plain / "sub" / "b #?%20.txt").read_bytes()
        assert (ours / "a.txt").read_text() == "line 1\nline 2\n"
    with (ours / "a.txt").open() as file:
        assert list(file) == ["line 1\n", "line 2\n"]
    with pytest.raises(FileNotFoundError):
        (ours / "nothing").read_bytes()


def test_a_path_travels(tree):
    path = pickle.loads(pickle.dumps(upath.UPath(f"xds://{tree}/a.txt")))
    assert path.read_text() == "line 1\nline 2\n"


def test_writing(tree, moves):
    ours, plain = both(tree)
    with moves(9, "write"):
        (ours / "new.bin").write_bytes(b"nine byte")
        (ours / "new.txt").write_text("ü\n")
    assert (plain / "new.bin").read_bytes() == b"nine byte"
    assert (plain / "new.txt").read_text() == "ü\n"
    (ours / "more" / "deep").mkdir(parents=True)
    (ours / "more" / "touched").touch()
    assert (plain / "more" / "touched").read_bytes() == b""
    (ours / "new.bin").rename(ours / "moved.bin")
    assert (plain / "moved.bin").read_bytes() == b"nine byte"
    assert not (plain / "new.bin").exists()
    (ours / "moved.bin").unlink()
    assert not (plain / "moved.bin").exists()
    (ours / "more" / "deep").rmdir()
    assert not (plain / "more" / "deep").exists()
