"""fsspec's own file systems over ``xds://``: caches, folders, mappings, rsync, parts of Parquet files."""

from __future__ import annotations

import fsspec
import numpy as np
import pytest
from fsspec.generic import GenericFileSystem, rsync
from fsspec.implementations.dirfs import DirFileSystem


@pytest.fixture
def memory():
    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    filesystem.pseudo_dirs[:] = [""]
    yield filesystem
    filesystem.store.clear()
    filesystem.pseudo_dirs[:] = [""]


@pytest.fixture
def tree(tmp_path):
    top = tmp_path / "tree"
    (top / "sub").mkdir(parents=True)
    (top / "a.bin").write_bytes(b"a" * 100)
    (top / "sub" / "b 1.bin").write_bytes(b"b" * 200)
    return top


#: Its cache of blocks is a mapped file that it never closes.
unclosed = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@unclosed
@pytest.mark.parametrize("name", ["simplecache", "filecache", "blockcache"])
def test_caches(data_file, content, tmp_path, moves, name):
    options = {name: {"cache_storage": str(tmp_path / "cache")}}
    with moves(100), fsspec.open(f"{name}::xds://{data_file}", "rb", **options) as file:
        file.seek(1000)
        assert file.read(100) == content[1000:1100]
        file.seek(0)
        assert file.read() == content
    with fsspec.open(f"{name}::xds://{data_file}", "rb", **options) as file:
        assert file.read() == content


@unclosed
@pytest.mark.parametrize("name", ["filecache", "blockcache"])
def test_a_cache_sees_that_a_file_changed(tmp_path, name):
    path = tmp_path / "f"
    options = {"cache_storage": str(tmp_path / "cache"), "check_files": True, "target_protocol": "xds"}
    fs = fsspec.filesystem(name, **options)
    path.write_bytes(b"one")
    with fs.open(str(path)) as file:
        assert file.read() == b"one"
    path.write_bytes(b"two")
    with fs.open(str(path)) as file:
        assert file.read() == b"two"


def test_many_files_through_a_cache(tree, tmp_path, moves):
    with moves(300):
        files = fsspec.open_files(
            f"simplecache::xds://{tree}/**/*.bin", simplecache={"cache_storage": str(tmp_path / "c")}
        )
        with files as opened:
            assert sorted(file.read() for file in opened) == [b"a" * 100, b"b" * 200]


def test_writing_through_a_cache(tmp_path, moves):
    with moves(5, "write"), fsspec.open(f"simplecache::xds://{tmp_path}/out", "wb") as file:
        file.write(b"hello")
    assert (tmp_path / "out").read_bytes() == b"hello"


def test_a_folder_as_root(fs, tree, moves):
    folder = DirFileSystem(str(tree), fs)
    assert sorted(folder.find("")) == ["a.bin", "sub/b 1.bin"]
    with moves(300):
        assert folder.cat("sub/b 1.bin") == b"b" * 200
        with folder.open("a.bin") as file:
            assert file.read() == b"a" * 100
    assert folder.info("a.bin")["name"] == "a.bin"
    assert folder.glob("sub/*") == ["sub/b 1.bin"]
    chained = fsspec.filesystem("dir", path=str(tree), target_protocol="xds")
    assert chained.cat_file("a.bin", 1, 3) == b"aa"
    folder.pipe_file("new", b"n")
    folder.mv("new", "newer")
    assert (tree / "newer").read_bytes() == b"n"
    folder.rm("newer")
    assert not (tree / "newer").exists()


def test_a_mapping(tree, moves):
    mapper = fsspec.get_mapper(f"xds://{tree}")
    assert sorted(mapper) == ["a.bin", "sub/b 1.bin"]
    with moves(300):
        assert mapper["a.bin"] == b"a" * 100
        assert mapper.getitems(["a.bin", "sub/b 1.bin", "no"], on_error="omit") == {
            "a.bin": b"a" * 100,
            "sub/b 1.bin": b"b" * 200,
        }
    assert "no" not in mapper
    with pytest.raises(KeyError):
        mapper["no"]
    mapper["new/deep"] = b"value"
    assert (tree / "new" / "deep").read_bytes() == b"value"
    del mapper["new/deep"]
    assert "new/deep" not in mapper
    mapper.setitems({"x": b"1", "sub/y": b"2"})
    assert (tree / "sub" / "y").read_bytes() == b"2"


def test_rsync_from_ours(tree, memory, moves):
    with moves(300):
        rsync(f"xds://{tree}", "memory://copy")
    assert memory.cat("/copy/sub/b 1.bin") == b"b" * 200
    assert memory.cat("/copy/a.bin") == b"a" * 100


def test_rsync_to_ours(tmp_path, memory, moves):
    memory.pipe({"/from/a": b"1", "/from/sub/b": b"22"})
    with moves(3, "write"):
        rsync("memory://from", f"xds://{tmp_path}/to")
    assert (tmp_path / "to" / "sub" / "b").read_bytes() == b"22"
    assert (tmp_path / "to" / "a").read_bytes() == b"1"


def test_rsync_within_ours(tree, tmp_path):
    rsync(f"xds://{tree}", f"xds://{tmp_path}/to")
    assert (tmp_path / "to" / "sub" / "b 1.bin").read_bytes() == b"b" * 200
    (tmp_path / "to" / "stale").write_bytes(b"")
    rsync(f"xds://{tree}", f"xds://{tmp_path}/to", delete_missing=True)
    assert not (tmp_path / "to" / "stale").exists()


def test_the_generic_file_system(tree, moves):
    generic = GenericFileSystem(default_method="current")
    assert generic.info(f"xds://{tree}/a.bin")["size"] == 100
    with moves(100):
        assert generic.cat(f"xds://{tree}/a.bin") == b"a" * 100


def test_local_names_are_refused_clearly(tree):
    with pytest.raises(ValueError, match="attribute local_file=True"):
        fsspec.open_local(f"xds://{tree}/a.bin")


def test_parts_of_a_parquet_file(tmp_path, moves):
    pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from fsspec.parquet import open_parquet_file

    table = pa.table({name: np.random.default_rng(1).standard_normal(30000) for name in "abcdef"})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=5000)
    size = (tmp_path / "t.parquet").stat().st_size
    with moves(size // 10), open_parquet_file(f"xds://{tmp_path}/t.parquet", columns=["c"], engine="pyarrow") as file:
        assert pq.read_table(file, columns=["c"]).equals(table.select(["c"]))
