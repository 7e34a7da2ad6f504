"""colibri#331: one read ends near 2^31 bytes; the rest stayed unread, and the message said Success."""

from __future__ import annotations

import numpy as np
import pytest
from checkpoint_files import entry, raw

import xds
from xds.interop.host import available_nbytes

NBYTES = (1 << 31) + (1 << 20) + 4097
MARKS = {0: 1, (1 << 31) - 4097: 2, (1 << 31) - 1: 3, 1 << 31: 4, NBYTES - 1: 5}


@pytest.mark.timeout(300)
@pytest.mark.skipif((available_nbytes() or 0) < 3 << 30, reason="needs 3 GiB of free memory")
def test_a_tensor_over_two_gib(tmp_path):
    path = tmp_path / "m.safetensors"
    head = raw(f'{{"t": {entry("U8", [NBYTES], 0, NBYTES)}}}')
    with path.open("wb") as file:
        file.write(head)
        for place, value in MARKS.items():
            file.seek(len(head) + place)
            file.write(bytes([value]))
    loaded = xds.load(path, device="cpu")
    array = loaded["t"]
    assert array.shape == (NBYTES,)
    assert {place: int(array[place]) for place in MARKS} == MARKS
    assert np.count_nonzero(array) == len(MARKS)
    assert loaded.report.nbytes == NBYTES
