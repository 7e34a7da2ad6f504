"""fsspec#801, #802, #803: ranges of no bytes were fetched all the same."""

from __future__ import annotations

import asyncio

import pytest

from xds.filesystem import XdsFileSystem

EMPTY = [(0, 0), (5, 5), (7, 3), (10, None), (50, 60), (None, 0), (-1, -1), (None, -10)]


class Counting:
    """Counts the bytes asked for."""

    def __init__(self, real):
        self._real, self.nbytes, self.transfers = real, 0, 0

    def __getattr__(self, name):
        return getattr(self._real, name)

    def open(self, path):
        outer, handle = self, self._real.open(path)

        class Handle:
            def __getattr__(self, name):
                return getattr(handle, name)

            def pread_into(self, view, offset):
                outer.nbytes += len(view)
                return handle.pread_into(view, offset)

        return Handle()

    def transfer(self, *args, **kwargs):
        self.transfers += 1
        return self._real.transfer(*args, **kwargs)


@pytest.fixture
def counted():
    fs = XdsFileSystem(skip_instance_cache=True)
    fs.backend = Counting(XdsFileSystem().backend)
    return fs


@pytest.mark.parametrize(("start", "end"), EMPTY)
def test_no_byte_is_asked_for(counted, tmp_path, start, end):
    (tmp_path / "f").write_bytes(b"0123456789")
    path = str(tmp_path / "f")
    assert counted.cat_file(path, start, end) == b""
    assert counted.cat_ranges([path] * 3, start, end) == [b""] * 3
    assert asyncio.run(counted._cat_ranges([path] * 2, start, end)) == [b""] * 2
    counted.readinto_ranges([path], [start], [end], [bytearray()])
    assert (counted.backend.nbytes, counted.backend.transfers) == (0, 0)
    assert counted.cat_ranges([], [], []) == []


def test_empty_files_and_reads(counted, tmp_path):
    (tmp_path / "f").write_bytes(b"")
    path = str(tmp_path / "f")
    with counted.open(path) as file:
        assert (file.read(), file.read(5), file.readline(), file.readinto(bytearray(5))) == (b"", b"", b"", 0)
    assert counted.cat_file(path) == b""
    assert counted.backend.nbytes == 0
