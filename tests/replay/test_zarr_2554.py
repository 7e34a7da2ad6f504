"""zarr#2554, #2808, #2946: stores need a file system that is asynchronous, made from a URL or from a sync one."""

from __future__ import annotations

import asyncio

import fsspec
import pytest
from fsspec.spec import AbstractFileSystem

from xds.filesystem import XdsFileSystem


def make_async(fs):
    """As stores turn a sync instance into an asynchronous one."""
    return (
        AbstractFileSystem.from_json(fs.to_json())
        if fs.asynchronous
        else AbstractFileSystem.from_dict({**fs.to_dict(), "asynchronous": True})
    )


@pytest.mark.parametrize("options", [{}, {"auto_mkdir": True, "fsync": "data", "unknown": 5}])
def test_sync_and_asynchronous_instances_of_the_same_options(options):
    fs = XdsFileSystem(**options)
    other = make_async(fs)
    assert type(other) is XdsFileSystem
    assert other.async_impl
    assert other.asynchronous
    assert not fs.asynchronous
    assert other.storage_options == {**fs.storage_options, "asynchronous": True}
    assert make_async(other) is other
    assert fsspec.url_to_fs("xds:///a", asynchronous=True, **options) == (other, "/a")


def test_what_a_store_awaits(tmp_path):
    async def check():
        fs, root = fsspec.url_to_fs(f"xds://{tmp_path}/store", asynchronous=True, auto_mkdir=True)
        await fs._pipe_file(f"{root}/c/0/0", b"0123456789")
        await fs._pipe_file(f"{root}/zarr.json", b"{}", mode="create")
        with pytest.raises(FileExistsError):
            await fs._pipe_file(f"{root}/zarr.json", b"{}", mode="create")
        assert await fs._cat_file(f"{root}/c/0/0", start=-4) == b"6789"
        assert await fs._cat_ranges([f"{root}/c/0/0"] * 2, starts=[2, None], ends=[None, 3], on_error="return") == [
            b"23456789", b"012",
        ]  # fmt: skip
        # A key that is missing is one of these, and nothing else.
        for key in ("c/0/1", "c", "zarr.json/x", "d/0"):
            with pytest.raises((FileNotFoundError, IsADirectoryError, NotADirectoryError)):
                await fs._cat_file(f"{root}/{key}")
        assert await fs._find(root) == [f"{root}/c/0/0", f"{root}/zarr.json"]
        assert await fs._ls(root, detail=False) == [f"{root}/c", f"{root}/zarr.json"]
        assert await fs._exists(f"{root}/zarr.json")
        assert not await fs._exists(f"{root}/zarr.json/x")
        await fs._rm(f"{root}/c", recursive=True)
        assert await fs._find(root) == [f"{root}/zarr.json"]

    asyncio.run(check())


def test_a_reference_store_over_it(tmp_path):
    (tmp_path / "data").write_bytes(b"0123456789")

    async def check():
        fs = fsspec.filesystem(
            "reference",
            fo={"key": [f"xds://{tmp_path}/data", 2, 5]},
            fs=XdsFileSystem(asynchronous=True),
            asynchronous=True,
            skip_instance_cache=True,
        )
        assert await fs._cat_file("key") == b"23456"

    asyncio.run(check())
