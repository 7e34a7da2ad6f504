"""cucim#1107: an aligned offset with an unaligned length: the tail was read from the wrong place under O_DIRECT."""

from __future__ import annotations

import numpy as np
import pytest
from checkpoint_files import drop_cache, noise

NBYTES = (8 << 20) + 1234


@pytest.fixture
def cold(tmp_path):
    path = tmp_path / "data.bin"
    data = noise(NBYTES)
    path.write_bytes(data)
    drop_cache(path)
    return str(path), data


@pytest.mark.parametrize("start", [0, 4096, 1 << 20, (4 << 20) + 512, 4097])
@pytest.mark.parametrize("length", [1, 511, 513, 4095, 4097, (2 << 20) + 1, (3 << 20) - 7])
def test_ranges_of_a_cold_file(fs, cold, start, length):
    path, data = cold
    array = np.full(length + 2, 0xEE, np.uint8)
    fs.readinto_ranges([path], [start], [start + length], [array[1:-1]])
    assert array[1:-1].tobytes() == data[start : start + length]
    assert array[0] == array[-1] == 0xEE
    assert fs.cat_file(path, start, start + length) == data[start : start + length]


def test_the_tail_of_a_cold_file(fs, cold):
    path, data = cold
    array = np.zeros(NBYTES - 4096, np.uint8)
    fs.readinto_ranges([path], [4096], [NBYTES], [array])
    assert array.tobytes() == data[4096:]
