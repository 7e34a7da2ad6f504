"""Dask reads ``xds://`` in processes of its own, and gives the same token to the same file in each."""

from __future__ import annotations

import subprocess
import sys

import fsspec
import numpy as np
import pytest

dask = pytest.importorskip("dask", reason="Dask is not installed")
pandas = pytest.importorskip("pandas", reason="pandas is not installed")
pytest.importorskip("pyarrow", reason="pyarrow is not installed")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def spawned():
    """Workers of a process pool that is spawned, not forked; one pool for all tests, as imports take long."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    with pool, dask.config.set(scheduler="processes", pool=pool):
        yield pool


@pytest.fixture
def folder(tmp_path):
    for number in range(3):
        frame = pandas.DataFrame({"id": np.arange(1000) + 1000 * number, "value": np.arange(1000.0)})
        frame.to_parquet(tmp_path / f"part.{number}.parquet")
        frame.to_csv(tmp_path / f"part.{number}.csv", index=False)
    return tmp_path


def test_parquet_in_other_processes(spawned, folder):
    dataframe = pytest.importorskip("dask.dataframe", reason="Dask has no dataframes here")

    def told(part):
        import xds

        return part.assign(moved=xds.stats()["nbytes"])

    url = f"xds://{folder}/part.*.parquet"
    got = dataframe.read_parquet(url).map_partitions(told).compute()
    expected = dataframe.read_parquet(f"file://{folder}/part.*.parquet").compute(scheduler="sync")
    pandas.testing.assert_frame_equal(got[["id", "value"]], expected)
    assert (got["moved"] > 0).all()


def test_bytes_in_other_processes(spawned, folder):
    from dask.bytes import read_bytes

    def told(block):
        import xds

        return block, xds.stats()["nbytes"]

    _, blocks = read_bytes(f"xds://{folder}/part.*.csv", blocksize=5000, delimiter=b"\n", sample=False)
    results = dask.compute(*[dask.delayed(told)(block) for file in blocks for block in file])
    whole = b"".join((folder / f"part.{number}.csv").read_bytes() for number in range(3))
    assert b"".join(block for block, _ in results) == whole
    assert all(nbytes > 0 for _, nbytes in results)


def test_open_files_travel(spawned, folder):
    def read(file, fs):
        import xds

        with file as opened:
            return opened.read(), fs.cat_file(opened.path, 0, 4), xds.stats()["nbytes"]

    file = fsspec.open(f"xds://{folder}/part.0.csv")
    data, start, moved = dask.compute(dask.delayed(read)(file, file.fs))[0]
    assert data == (folder / "part.0.csv").read_bytes()
    assert start == data[:4]
    assert moved >= len(data)


def test_tokens_are_the_same_in_every_process(folder):
    from dask.base import tokenize

    code = f"import fsspec\nfrom dask.base import tokenize\nprint(tokenize(fsspec.open('xds://{folder}/part.0.csv')))\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    with dask.config.set({"tokenize.ensure-deterministic": True}):
        here = tokenize(fsspec.open(f"xds://{folder}/part.0.csv"))
    assert done.stdout.strip() == here


def test_writing_parquet(spawned, folder, tmp_path):
    dataframe = pytest.importorskip("dask.dataframe", reason="Dask has no dataframes here")
    frame = pandas.DataFrame({"id": np.arange(3000)})
    dataframe.from_pandas(frame, npartitions=3).to_parquet(f"xds://{tmp_path}/out")
    pandas.testing.assert_frame_equal(pandas.read_parquet(tmp_path / "out").reset_index(drop=True), frame)
