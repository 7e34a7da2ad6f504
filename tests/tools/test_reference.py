"""``reference://``: keys of a JSON document (as kerchunk writes it) that name ranges of ``xds://`` files."""

from __future__ import annotations

import json

import fsspec
import numpy as np
import pytest


@pytest.fixture
def values():
    return np.arange(60, dtype="<i4").reshape(6, 10)


@pytest.fixture
def references(tmp_path, values):
    """A document about one zarr 2 array whose two chunks lie in a larger file, as in a NetCDF file."""
    raw = tmp_path / "old data.nc"
    raw.write_bytes(b"x" * 1000 + values[:3].tobytes() + b"y" * 77 + values[3:].tobytes() + b"end")
    array = {
        "zarr_format": 2,
        "shape": [6, 10],
        "chunks": [3, 10],
        "dtype": "<i4",
        "compressor": None,
        "fill_value": 0,
        "order": "C",
        "filters": None,
    }
    refs = {
        ".zgroup": json.dumps({"zarr_format": 2}),
        "a/.zarray": json.dumps(array),
        "a/.zattrs": "{}",
        "a/0.0": ["{{u}}", 1000, 120],
        "a/1.0": [f"xds://{raw}", 1197, 120],
        "whole": [f"xds://{raw}"],
        "inline": "base64:aGVsbG8=",
    }
    path = tmp_path / "refs.json"
    path.write_text(json.dumps({"version": 1, "templates": {"u": f"xds://{raw}"}, "refs": refs}))
    return path


@pytest.fixture
def reference(references):
    return fsspec.filesystem("reference", fo=f"xds://{references}", remote_protocol="xds", skip_instance_cache=True)


def test_bytes(reference, values, moves):
    with moves(240):
        assert reference.cat("a/0.0") == values[:3].tobytes()
        assert reference.cat_file("a/1.0") == values[3:].tobytes()
    assert reference.cat("inline") == b"hello"
    assert reference.cat_file("a/1.0", start=4, end=12) == values[3:].tobytes()[4:12]
    assert reference.cat(["a/0.0", "a/1.0"]) == {"a/0.0": values[:3].tobytes(), "a/1.0": values[3:].tobytes()}
    assert reference.cat_ranges(["a/0.0", "a/1.0"], [0, 4], [4, 8]) == [
        values[:3].tobytes()[:4],
        values[3:].tobytes()[4:8],
    ]


def test_open(reference, values):
    with reference.open("a/1.0") as file:
        assert file.read() == values[3:].tobytes()


def test_names(reference):
    assert reference.cat("whole").endswith(b"end")
    assert set(reference.find("")) >= {"a/.zarray", "a/0.0", "a/1.0", "whole"}
    assert reference.info("a/0.0")["size"] == 120


def test_a_zarr_array_over_references(references, values, moves):
    zarr = pytest.importorskip("zarr", minversion="3.0", reason="zarr 3 is not installed")
    from zarr.storage import FsspecStore

    fs = fsspec.filesystem(
        "reference",
        fo=f"xds://{references}",
        remote_protocol="xds",
        remote_options={"asynchronous": True},
        asynchronous=True,
        skip_instance_cache=True,
    )
    with moves(240):
        group = zarr.open_group(FsspecStore(fs, read_only=True, path=""), mode="r", zarr_format=2)
        np.testing.assert_array_equal(group["a"][:], values)
