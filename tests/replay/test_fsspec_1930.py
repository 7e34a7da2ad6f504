"""fsspec#1930: every chained URL added an instance that was never let go."""

from __future__ import annotations

import fsspec

from xds.filesystem import XdsFileSystem


def test_chained_urls_share_one_instance(tmp_path):
    for number in range(30):
        (tmp_path / f"f{number}").write_bytes(b"%d" % number)
    fsspec.filesystem("xds")
    before = len(XdsFileSystem._cache)
    cache = {"cache_storage": str(tmp_path / "cache")}
    for number in range(30):
        with fsspec.open(f"simplecache::xds://{tmp_path}/f{number}", simplecache=cache) as file:
            assert file.read() == b"%d" % number
        with fsspec.open(f"filecache::xds://{tmp_path}/f{number}", filecache=cache) as file:
            assert file.read() == b"%d" % number
        with fsspec.open(f"xds://{tmp_path}/f{number}") as file:
            assert file.read() == b"%d" % number
    assert len(XdsFileSystem._cache) == before


def test_options_of_fsspec_open_become_one_instance(tmp_path):
    (tmp_path / "f").write_bytes(b"x")
    XdsFileSystem(cache_type="bytes")
    before = len(XdsFileSystem._cache)
    for _ in range(10):
        with fsspec.open(f"xds://{tmp_path}/f", cache_type="bytes", fsync="none", timeout_s="60") as file:
            assert file.cache.name == "bytes"
    assert len(XdsFileSystem._cache) == before
