"""LMCache#1604.

2,985,984 bytes were asked for and 2,983,936 came: the tail was no multiple of 4 KiB. All bytes come.
"""

from __future__ import annotations

import numpy as np
import pytest
from checkpoint_files import drop_cache, noise, write

import xds


@pytest.mark.parametrize("nbytes", [2_985_984, 2_983_936 + 1, 4096 * 700 - 1, 4096 * 700 + 1, 511, 512, 513])
@pytest.mark.parametrize("cold", [False, True])
def test_tails(tmp_path, fs, nbytes, cold):
    data = noise(nbytes)
    plain = tmp_path / "block.bin"
    plain.write_bytes(data)
    model = write(tmp_path / "m.safetensors", {"kv": ("U8", (nbytes,), data)})
    if cold:
        drop_cache(plain)
        drop_cache(model)
    array = np.zeros(nbytes, np.uint8)
    fs.readinto_ranges([str(plain)], [0], [nbytes], [array])
    assert array.tobytes() == data
    loaded = xds.load(model, device="cpu")
    assert loaded["kv"].tobytes() == data
    assert loaded.report.nbytes == nbytes
