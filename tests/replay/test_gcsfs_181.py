"""gcsfs#181: a pickle carried the listings, 7 MB of them."""

from __future__ import annotations

import pickle

import fsspec


def test_pickles_are_small(fs, tmp_path, data_file):
    for number in range(300):
        (tmp_path / f"file{number}").write_bytes(b"x")
    before = len(pickle.dumps(fs))
    fs.ls(str(tmp_path))
    fs.find(str(tmp_path))
    fs.cat(f"{tmp_path}/file*")
    assert len(pickle.dumps(fs)) == before < 1000
    with fs.open(data_file, cache_type="all") as file:
        file.read()
        assert len(pickle.dumps(file)) < 2000
    assert len(pickle.dumps(fsspec.open(f"xds://{data_file}"))) < 2000
