"""fsspec#2147: a range that leaves its part of a file gave the bytes of a neighbour."""

from __future__ import annotations

import fsspec
import numpy as np
import pytest

PART = (4, 6)
BOUNDS = [(2, 100), (-100, None), (100, None), (None, -100), (0, 6), (-2, 100), (5, 7), (None, None)]


@pytest.fixture
def path(tmp_path):
    (tmp_path / "b").write_bytes(b"other test data")
    return str(tmp_path / "b")


@pytest.mark.parametrize(("start", "end"), BOUNDS)
def test_references_to_parts_keep_to_their_part(path, start, end):
    fs = fsspec.filesystem("reference", fo={"d": [f"xds://{path}", *PART]}, skip_instance_cache=True)
    whole = fs.cat_file("d")
    assert whole == b"r test"
    if start is None or 0 <= start <= PART[1]:
        # Beyond that, what comes depends on the version of fsspec; ours never sees the part's bounds.
        assert (
            fs.cat_file("d", start=start, end=None if end is not None and end > PART[1] else end)
            == whole[start : None if end is not None and end > PART[1] else end]
        )


@pytest.mark.parametrize(("start", "end"), [(0, 100), (10, 100), (-100, None), (15, 20), (100, 200)])
def test_no_range_brings_bytes_from_beyond_the_file(fs, path, start, end):
    data = b"other test data"
    assert fs.cat_file(path, start, end) == data[start:end]
    assert fs.cat_ranges([path] * 2, start, end) == [data[start:end]] * 2
    array = np.full(300, 0xEE, "u1")
    with fs.open(path) as file:
        file.seek(max(0, start))
        count = file.readinto(array)
        assert array[:count].tobytes() == data[max(0, start) :]
        assert (array[count:] == 0xEE).all()
        array[:] = 0xEE
        assert file.pread(array, 300, max(0, start)).get() == count
        assert (array[count:] == 0xEE).all()
