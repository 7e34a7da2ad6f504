"""s3fs#124: what came from a pickle could not be pickled again."""

from __future__ import annotations

import pickle

import fsspec
import pytest

from xds.filesystem import XdsFileSystem


@pytest.mark.parametrize(
    "options", [{}, {"fsync": "data"}, {"unknown": 1}, {"skip_instance_cache": True}, {"asynchronous": True}]
)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_file_systems_again_and_again(options, protocol):
    fs = XdsFileSystem(**options)
    for _ in range(3):
        fs = pickle.loads(pickle.dumps(fs, protocol))
        assert type(fs) is XdsFileSystem
        expected = {key: value for key, value in options.items() if key != "skip_instance_cache"}
        assert fs.storage_options == expected


def test_open_files_again_and_again(fs, data_file, content):
    file = fs.open(data_file, cache_type="blockcache", block_size=1000, cache_options={"maxblocks": 3})
    file.seek(17)
    for number in range(3):
        file = pickle.loads(pickle.dumps(file))
        assert file.tell() == 17 + number
        assert (file.cache.name, file.blocksize, file.cache.maxblocks) == ("blockcache", 1000, 3)
        assert file.read(1) == content[17 + number : 18 + number]
    opened = fsspec.open(f"xds://{data_file}")
    for _ in range(3):
        opened = pickle.loads(pickle.dumps(opened))
        with opened as file:
            assert file.read(5) == content[:5]
