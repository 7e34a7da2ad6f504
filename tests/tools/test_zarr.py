"""zarr 3 over ``FsspecStore``."""

from __future__ import annotations

import fsspec
import numpy as np
import pytest

zarr = pytest.importorskip("zarr", minversion="3.0", reason="zarr 3 is not installed")
storage = pytest.importorskip("zarr.storage", reason="zarr has no stores")


@pytest.fixture
def values():
    return np.random.default_rng(1).standard_normal((300, 400))


@pytest.fixture
def written(tmp_path, values):
    """A group with a chunked and a sharded array, written to plain files."""
    group = zarr.create_group(storage.LocalStore(tmp_path / "g.zarr"), attributes={"title": "ü"})
    group.create_array("chunked", data=values, chunks=(64, 100))
    group.create_array("sharded", data=values, chunks=(32, 50), shards=(128, 200))
    return tmp_path / "g.zarr"


def store(path, **options):
    # Keys are paths, and zarr makes no folders: as for file://, the file system is to make them.
    return storage.FsspecStore.from_url(f"xds://{path}", storage_options={"auto_mkdir": True}, **options)


def test_reading(written, values, moves):
    with moves(values.nbytes // 2):
        group = zarr.open_group(store(written), mode="r")
        assert dict(group.attrs) == {"title": "ü"}
        assert sorted(group.array_keys()) == ["chunked", "sharded"]
        for name in ("chunked", "sharded"):
            np.testing.assert_array_equal(group[name][:], values)
            np.testing.assert_array_equal(group[name][10:33, 7:301:3], values[10:33, 7:301:3])
        np.testing.assert_array_equal(group["sharded"].oindex[[5, 290], [3, 377]], values[np.ix_([5, 290], [3, 377])])


def test_missing_chunks_are_the_fill_value(tmp_path):
    zarr.create_array(storage.LocalStore(tmp_path / "a"), shape=(10, 10), chunks=(5, 5), dtype="f4", fill_value=7.0)
    array = zarr.open_array(store(tmp_path / "a"), mode="r")
    assert (array[:] == 7).all()


def test_what_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        zarr.open_group(store(tmp_path / "no"), mode="r")


def test_ranges_of_a_store(written, moves):
    import asyncio

    from zarr.abc.store import OffsetByteRequest, RangeByteRequest, SuffixByteRequest
    from zarr.core.buffer import default_buffer_prototype

    key = "chunked/c/0/0"
    whole = (written / key).read_bytes()
    wanted = [RangeByteRequest(3, 9), OffsetByteRequest(100), SuffixByteRequest(11), None]

    async def read():
        opened = store(written, read_only=True)
        prototype = default_buffer_prototype()
        one = [await opened.get(key, prototype, request) for request in wanted]
        many = await opened.get_partial_values(prototype, [(key, request) for request in wanted])
        missing = await opened.get("chunked/c/9/9", prototype)
        names = [name async for name in opened.list_dir("chunked")]
        return [buffer.to_bytes() for buffer in one], [buffer.to_bytes() for buffer in many], missing, sorted(names)

    with moves(1):
        one, many, missing, names = asyncio.run(read())
    assert one == many == [whole[3:9], whole[100:], whole[-11:], whole]
    assert missing is None
    assert names == ["c", "zarr.json"]


def test_a_store_of_an_asynchronous_file_system(written, values, moves):
    fs = fsspec.filesystem("xds", asynchronous=True)
    with moves(1):
        group = zarr.open_group(storage.FsspecStore(fs, path=str(written), read_only=True), mode="r")
        np.testing.assert_array_equal(group["sharded"][:], values)


def test_writing(tmp_path, values, moves):
    with moves(values.nbytes // 2, "write"):
        group = zarr.create_group(store(tmp_path / "w.zarr"), attributes={"n": 1})
        group.create_array("chunked", data=values, chunks=(64, 100))
        group.create_array("sharded", data=values, chunks=(32, 50), shards=(128, 200))
        group["chunked"][5:9] = 0
    plain = zarr.open_group(storage.LocalStore(tmp_path / "w.zarr"), mode="r")
    np.testing.assert_array_equal(plain["sharded"][:], values)
    assert (plain["chunked"][5:9] == 0).all()
    np.testing.assert_array_equal(plain["chunked"][9:], values[9:])
    del zarr.open_group(store(tmp_path / "w.zarr"), mode="a")["chunked"]
    assert not (tmp_path / "w.zarr" / "chunked" / "zarr.json").exists()
