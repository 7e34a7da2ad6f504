"""Hugging Face datasets: files by pattern, streams, and datasets saved as folders."""

from __future__ import annotations

import os

import pytest

import xds

# Offline mode would refuse every URL. Nobody is to be told what is loaded.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

datasets = pytest.importorskip("datasets", reason="Hugging Face datasets is not installed")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

ROWS = {"id": list(range(300)), "text": [f"line {number} ü" for number in range(300)]}


@pytest.fixture(autouse=True)
def _quiet():
    datasets.disable_progress_bars()


@pytest.fixture
def folder(tmp_path):
    dataset = datasets.Dataset.from_dict(ROWS)
    for number in range(3):
        dataset.shard(3, number).to_parquet(tmp_path / f"part-{number}.parquet")
        dataset.shard(3, number).to_json(tmp_path / f"part-{number}.jsonl")
    return tmp_path


@pytest.mark.parametrize(("kind", "pattern"), [("parquet", "part-*.parquet"), ("json", "part-*.jsonl")])
def test_files_by_pattern(folder, tmp_path, moves, kind, pattern):
    with moves(1000):
        got = datasets.load_dataset(
            kind, data_files=f"xds://{folder}/{pattern}", split="train", cache_dir=str(tmp_path / "cache")
        )
    assert got.to_dict() == ROWS


def test_a_stream_is_refused_clearly(folder):
    """It makes ``xds://data`` of ``xds:///data`` (xPath), which could as well be a host: that is never guessed."""
    with pytest.raises(xds.errors.UrlError, match="Did you mean 'xds:///"):
        datasets.load_dataset(
            "parquet", data_files={"train": f"xds://{folder}/*.parquet"}, split="train", streaming=True
        )


def test_a_stream_of_what_is_loaded(folder, tmp_path, moves):
    with moves(1000):
        loaded = datasets.load_dataset(
            "parquet", data_files=f"xds://{folder}/*.parquet", split="train", cache_dir=str(tmp_path / "cache")
        )
    assert [row["id"] for row in loaded.to_iterable_dataset()] == ROWS["id"]


def test_save_and_load(tmp_path, moves):
    dataset = datasets.Dataset.from_dict(ROWS)
    with moves(1000, "write"):
        dataset.save_to_disk(f"xds://{tmp_path}/saved", num_shards=2)
    assert datasets.load_from_disk(tmp_path / "saved").to_dict() == ROWS
    with moves(1000):
        got = datasets.load_from_disk(f"xds://{tmp_path}/saved")
    assert got.to_dict() == ROWS


def test_load_what_was_saved_to_plain_files(tmp_path, moves):
    datasets.Dataset.from_dict(ROWS).save_to_disk(tmp_path / "saved")
    with moves(1000):
        got = datasets.load_from_disk(f"xds://{tmp_path}/saved")
    assert got.to_dict() == ROWS


def test_parquet_and_json_by_url(tmp_path, moves):
    dataset = datasets.Dataset.from_dict(ROWS)
    with moves(1000, "write"):
        dataset.to_parquet(f"xds://{tmp_path}/out.parquet")
        dataset.to_json(f"xds://{tmp_path}/out.jsonl")
    assert datasets.Dataset.from_parquet(str(tmp_path / "out.parquet"), cache_dir=str(tmp_path / "c")).to_dict() == ROWS
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 300
