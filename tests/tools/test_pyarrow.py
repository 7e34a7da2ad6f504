"""pyarrow's datasets and file systems over ``xds://``."""

from __future__ import annotations

import fsspec
import numpy as np
import pytest

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
ds = pytest.importorskip("pyarrow.dataset", reason="pyarrow has no datasets")
pafs = pytest.importorskip("pyarrow.fs", reason="pyarrow has no file systems")
pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow has no Parquet")


@pytest.fixture
def table():
    return pa.table({"id": np.arange(30000), "part": np.arange(30000) % 4, "value": np.linspace(0, 1, 30000)})


@pytest.fixture
def arrow(fs):
    return pafs.PyFileSystem(pafs.FSSpecHandler(fs))


@pytest.fixture
def plain():
    return pafs.PyFileSystem(pafs.FSSpecHandler(fsspec.filesystem("file")))


def told(infos):
    return sorted((info.path, info.type, info.size, info.mtime_ns) for info in infos)


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "sub" / "deep").mkdir(parents=True)
    (tmp_path / "a.bin").write_bytes(b"abc")
    (tmp_path / "sub" / "b [1] #?.bin").write_bytes(b"defg")
    (tmp_path / "sub" / "deep" / "c.bin").write_bytes(b"")
    return tmp_path


def test_file_infos(arrow, plain, tree):
    names = [str(tree / name) for name in ("a.bin", "sub", "sub/b [1] #?.bin", "nothing")]
    infos = arrow.get_file_info(names)
    assert [info.type for info in infos] == [
        pafs.FileType.File,
        pafs.FileType.Directory,
        pafs.FileType.File,
        pafs.FileType.NotFound,
    ]
    assert [info.size for info in infos] == [3, None, 4, None]
    assert [(info.path, info.type, info.size) for info in infos] == [
        (info.path, info.type, info.size) for info in plain.get_file_info(names)
    ]


@pytest.mark.parametrize("recursive", [False, True])
def test_selectors(arrow, plain, tree, recursive):
    selector = pafs.FileSelector(str(tree), recursive=recursive)
    local = told(pafs.LocalFileSystem().get_file_info(selector))
    assert [row[:3] for row in told(arrow.get_file_info(selector))] == [row[:3] for row in local]
    missing = pafs.FileSelector(str(tree / "nothing"), allow_not_found=True)
    assert arrow.get_file_info(missing) == []


def test_two_handlers_of_one_file_system_are_equal(arrow):
    other = pafs.PyFileSystem(pafs.FSSpecHandler(fsspec.filesystem("xds")))
    assert arrow == other
    assert arrow.type_name == "py::fsspec+xds"


def test_input_files(arrow, data_file, content, moves):
    with moves(len(content)), arrow.open_input_file(data_file) as file:
        assert file.size() == len(content)
        assert file.read() == content
        assert file.read_at(100, 77) == content[77:177]
    with moves(len(content)), arrow.open_input_stream(data_file) as stream:
        assert stream.read() == content
    with pytest.raises(FileNotFoundError):
        arrow.open_input_file(f"{data_file}.no")


def test_a_hive_dataset(fs, tmp_path, table, moves):
    options = {"format": "parquet", "partitioning": ds.partitioning(pa.schema([("part", pa.int64())]), flavor="hive")}
    ds.write_dataset(table, tmp_path / "hive", **options)
    with moves(20000):
        got = ds.dataset(f"{tmp_path}/hive", filesystem=fs, **options).to_table()
    expected = ds.dataset(tmp_path / "hive", **options).to_table()
    assert got.sort_by("id").equals(expected.sort_by("id"))
    with moves():
        filtered = ds.dataset(f"{tmp_path}/hive", filesystem=fs, **options).to_table(filter=ds.field("part") == 3)
    assert set(filtered["part"].to_pylist()) == {3}


def test_a_dataset_by_url(tmp_path, table, moves):
    pq.write_table(table, tmp_path / "one.parquet", row_group_size=4000)
    with moves():
        got = ds.dataset(f"fsspec+xds://{tmp_path}/one.parquet").to_table(columns=["value"])
    assert got.equals(table.select(["value"]))


def test_parquet_files(fs, tmp_path, table, moves):
    path = str(tmp_path / "one.parquet")
    pq.write_table(table, path, row_group_size=4000)
    with moves():
        assert pq.read_table(path, filesystem=fs).equals(table)
    with moves(), fs.open(path) as file:
        parquet = pq.ParquetFile(file, pre_buffer=True)
        assert parquet.read_row_group(3, columns=["id"]).equals(table.select(["id"]).slice(12000, 4000))


def test_writing(fs, arrow, tmp_path, table, moves):
    with moves(20000, "write"):
        pq.write_table(table, str(tmp_path / "one.parquet"), filesystem=fs)
    assert pq.read_table(tmp_path / "one.parquet").equals(table)
    with moves(20000, "write"):
        ds.write_dataset(
            table,
            f"{tmp_path}/hive",
            filesystem=fs,
            format="parquet",
            partitioning=["part"],
            partitioning_flavor="hive",
        )
    got = ds.dataset(tmp_path / "hive", partitioning="hive").to_table()
    assert got.sort_by("id")["value"].equals(table["value"])


def test_the_file_system_writes(arrow, tmp_path):
    arrow.create_dir(f"{tmp_path}/x/y", recursive=True)
    with arrow.open_output_stream(f"{tmp_path}/x/y/f") as stream:
        stream.write(b"one")
    assert (tmp_path / "x/y/f").read_bytes() == b"one"
    arrow.copy_file(f"{tmp_path}/x/y/f", f"{tmp_path}/x/g")
    arrow.move(f"{tmp_path}/x/g", f"{tmp_path}/x/h")
    assert (tmp_path / "x/h").read_bytes() == b"one"
    arrow.delete_file(f"{tmp_path}/x/h")
    arrow.delete_dir_contents(f"{tmp_path}/x/y")
    assert [path.name for path in (tmp_path / "x").rglob("*")] == ["y"]
    arrow.delete_dir(f"{tmp_path}/x")
    assert not (tmp_path / "x").exists()
