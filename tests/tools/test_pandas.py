"""pandas reads and writes ``xds://`` as it does plain files."""

from __future__ import annotations

import numpy as np
import pytest

pandas = pytest.importorskip("pandas", reason="pandas is not installed")
pytest.importorskip("pyarrow", reason="pyarrow is not installed")


@pytest.fixture
def frame():
    random = np.random.default_rng(7)
    return pandas.DataFrame(
        {
            "id": np.arange(20000),
            "value": random.standard_normal(20000),
            "word": [f"w {number % 97} ü" for number in range(20000)],
        }
    )


def test_read_parquet(tmp_path, frame, moves):
    path = tmp_path / "a b%20#?.parquet"
    frame.to_parquet(path)
    with moves(path.stat().st_size // 2):
        got = pandas.read_parquet(f"xds://{path}")
    pandas.testing.assert_frame_equal(got, pandas.read_parquet(path))
    with moves():
        got = pandas.read_parquet(f"xds://{path}", columns=["value"], storage_options={"use_listings_cache": False})
    pandas.testing.assert_frame_equal(got, frame[["value"]])


def test_read_parquet_of_a_folder(tmp_path, frame, moves):
    frame.assign(part=frame["id"] % 3).to_parquet(tmp_path / "folder", partition_cols=["part"])
    with moves():
        got = pandas.read_parquet(f"xds://{tmp_path}/folder")
    expected = pandas.read_parquet(tmp_path / "folder")
    pandas.testing.assert_frame_equal(got.sort_values("id"), expected.sort_values("id"))
    with moves():
        got = pandas.read_parquet(f"xds://{tmp_path}/folder", filters=[("part", "=", 1)])
    assert set(got["id"] % 3) == {1}


@pytest.mark.parametrize("name", ["table.csv", "table.csv.gz", "table.csv.bz2"])
def test_read_csv(tmp_path, frame, moves, name):
    frame.to_csv(tmp_path / name, index=False)
    with moves((tmp_path / name).stat().st_size):
        got = pandas.read_csv(f"xds://{tmp_path}/{name}")
    pandas.testing.assert_frame_equal(got, pandas.read_csv(tmp_path / name))


def test_read_csv_in_chunks(tmp_path, frame, moves):
    frame.to_csv(tmp_path / "t.csv", index=False)
    with moves(), pandas.read_csv(f"xds://{tmp_path}/t.csv", chunksize=7000) as reader:
        got = pandas.concat(list(reader))
    pandas.testing.assert_frame_equal(got, pandas.read_csv(tmp_path / "t.csv"))


def test_to_parquet(tmp_path, frame, moves):
    with moves(10000, "write"):
        frame.to_parquet(f"xds://{tmp_path}/out.parquet")
    frame.to_parquet(tmp_path / "plain.parquet")
    pandas.testing.assert_frame_equal(pandas.read_parquet(tmp_path / "out.parquet"), frame)
    assert (tmp_path / "out.parquet").read_bytes() == (tmp_path / "plain.parquet").read_bytes()


def test_to_parquet_in_parts(tmp_path, frame, moves):
    with moves(10000, "write"):
        frame.assign(part=frame["id"] % 3).to_parquet(f"xds://{tmp_path}/parts", partition_cols=["part"])
    got = pandas.read_parquet(tmp_path / "parts")
    pandas.testing.assert_frame_equal(got[["id", "value", "word"]].sort_values("id", ignore_index=True), frame)


@pytest.mark.parametrize("name", ["table.csv", "table.csv.gz"])
def test_to_csv(tmp_path, frame, moves, name):
    with moves(10000, "write"):
        frame.to_csv(f"xds://{tmp_path}/{name}", index=False)
    pandas.testing.assert_frame_equal(pandas.read_csv(tmp_path / name), frame)


class Bad:
    """Cannot be written."""

    def __str__(self):
        raise ZeroDivisionError


@pytest.fixture
def bad():
    return pandas.DataFrame({"value": [*range(100000), Bad()]}, dtype=object)


def test_a_to_parquet_that_fails_leaves_the_old_file(tmp_path, bad):
    path = tmp_path / "t.parquet"
    path.write_bytes(b"old")
    with pytest.raises(Exception, match=r"Bad|int"):
        bad.to_parquet(f"xds://{path}")
    assert path.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["t.parquet"]


def test_a_to_csv_that_fails_in_a_transaction_leaves_the_old_file(fs, tmp_path, bad):
    path = tmp_path / "t.csv"
    path.write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), fs.transaction:
        bad.to_csv(f"xds://{path}")
    assert path.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["t.csv"]


def test_a_missing_file_is_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        pandas.read_csv(f"xds://{tmp_path}/no.csv")
    with pytest.raises(FileNotFoundError):
        pandas.read_parquet(f"xds://{tmp_path}/no.parquet")
