"""DALI#6147: a header of exactly 4 KiB before the data broke the reader that uses O_DIRECT, and no other."""

from __future__ import annotations

import numpy as np
import pytest
from checkpoint_files import drop_cache, noise

import xds
from xds.engine import mover

NBYTES = (6 << 20) + 8


@pytest.fixture(params=["uring,buffered", "direct,buffered", "uring,direct"], ids=["direct", "uring", "buffered"])
def only(request, monkeypatch):
    """One way to read a cold file."""
    mover.close()
    monkeypatch.setenv("XDS_MOVER_FORBID", request.param)
    yield request.node.callspec.id
    mover.close()


@pytest.mark.parametrize("header_nbytes", [4095, 4096, 4097, 8192])
def test_the_same_bytes_each_way(fs, tmp_path, only, header_nbytes):
    values = np.frombuffer(noise(NBYTES), np.uint8)
    path = tmp_path / "array.npy"
    # Version 1.0 of the format: magic, version, length, then the dictionary, padded and ended by a newline.
    words = f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({NBYTES},), }}".encode()
    padded = words.ljust(header_nbytes - 11) + b"\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded + values.tobytes())
    assert (np.load(path) == values).all()
    drop_cache(path)
    array = np.zeros(NBYTES, np.uint8)
    with xds.XdsFileSystem().open(str(path)) as file:
        file.seek(header_nbytes)
        assert file.readinto(array) == NBYTES
        assert sum(file.report.method.values()) == NBYTES
    assert (array == values).all()
