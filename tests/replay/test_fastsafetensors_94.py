"""fastsafetensors#94.

About twice the shard's size stayed allocated after close. Dropped arrays give their memory back.
"""

from __future__ import annotations

import gc

from checkpoint_files import noise, write

import xds

NBYTES = 16 << 20


def resident_nbytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_memory_comes_back(tmp_path):
    data = noise(NBYTES)
    path = write(tmp_path / "m.safetensors", {f"t{n}": ("U8", (NBYTES,), data) for n in range(8)})
    del data
    xds.load(path, device="cpu")
    gc.collect()
    xds.close()
    before = resident_nbytes()
    for _ in range(3):
        loaded = xds.load(path, device="cpu")
        assert resident_nbytes() - before > 6 * NBYTES
        del loaded
        gc.collect()
        xds.close()
        assert resident_nbytes() - before < NBYTES
