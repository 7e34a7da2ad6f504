"""fsspec#2101: a range whose ends cross gave the rest of the file."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from xds.filesystem import XdsFileSystem

DATA = bytes(range(200))
BOUNDS = [None, -500, -201, -200, -199, -10, -1, 0, 1, 5, 10, 199, 200, 201, 500]


@pytest.fixture
def path(tmp_path):
    (tmp_path / "f").write_bytes(DATA)
    return str(tmp_path / "f")


def test_every_pair_of_bounds_is_a_slice(fs, path):
    pairs = list(itertools.product(BOUNDS, BOUNDS))
    expected = [DATA[start:end] for start, end in pairs]
    assert [fs.cat_file(path, start, end) for start, end in pairs] == expected
    starts, ends = zip(*pairs, strict=True)
    assert fs.cat_ranges([path] * len(pairs), list(starts), list(ends)) == expected
    with fs.open(path) as file:
        for start in (0, 5, 200, 500):
            file.seek(start)
            assert file.read() == DATA[start:]


def test_every_pair_of_bounds_is_a_slice_for_coroutines(path):
    async def check():
        fs = XdsFileSystem(asynchronous=True)
        for start, end in itertools.product(BOUNDS, BOUNDS):
            assert await fs._cat_file(path, start, end) == DATA[start:end]

    asyncio.run(check())
