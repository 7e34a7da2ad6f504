"""s3fs#433: a start of 0 was taken for none given."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("start", "end"), [(0, 4), (0, None), (0, -1), (0, 0), (None, 0), (-0, 5), (0, 10), (None, None)]
)
def test_zero_is_a_bound(fs, tmp_path, start, end):
    data = b"0123456789"
    path = str(tmp_path / "f")
    fs.pipe_file(path, data)
    assert fs.cat_file(path, start=start, end=end) == data[start:end]
    assert fs.cat_ranges([path], [start], [end]) == [data[start:end]]
    assert fs.cat_ranges([path], start, end) == [data[start:end]]
    assert fs.cat(path, start=start, end=end) == data[start:end]
    array = bytearray(len(data[start:end]))
    fs.readinto_ranges([path], [start], [end], [array])
    assert array == data[start:end]
    with fs.open(path) as file:
        target = bytearray(4)
        assert file.pread(target, 4, 0).get() == 4
        assert target == data[:4]
        assert file.pread(target, 0, 4).get() == 0
