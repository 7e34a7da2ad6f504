"""fsspec#2168 and #2155: negative bounds of a file without a size failed."""

from __future__ import annotations

import fsspec
import pytest


@pytest.mark.parametrize("url", ["xds://{}", "simplecache::xds://{}", "filecache::xds://{}"])
@pytest.mark.parametrize(("start", "end"), [(-5, None), (None, -5), (-8, -3), (2, -2), (-100, 3)])
def test_negative_bounds_alone_and_behind_caches(tmp_path, url, start, end):
    data = b"0123456789"
    (tmp_path / "f").write_bytes(data)
    options = {} if "::" not in url else {url.partition("::")[0]: {"cache_storage": str(tmp_path / "cache")}}
    fs, path = fsspec.url_to_fs(url.format(tmp_path / "f"), **options)
    with fs.open(path) as file:
        assert file.seek(-5, 2) == 5
        assert file.read() == data[-5:]
    if "::" not in url:
        with fs.open(path) as file:
            assert file.size == len(data)
        assert fs.cat_file(path, start, end) == data[start:end]
        assert fs.cat_ranges([path], [start], [end]) == [data[start:end]]
    assert fs.tail(path, 3) == data[-3:]
    assert fs.size(path) == len(data)


def test_writers_know_their_size(fs, tmp_path):
    with fs.open(str(tmp_path / "w"), "wb") as file:
        for nbytes in (0, 5, 300_000):
            file.write(bytes(nbytes))
            assert file.size == file.tell()
            assert file.seek(0, 2) == file.size
