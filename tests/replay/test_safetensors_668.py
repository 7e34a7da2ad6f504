"""safetensors#668: a header over 100 MB (1.29 million tensors) was refused by a fixed limit."""

from __future__ import annotations

import pytest
from checkpoint_files import write

import xds
from xds.errors import CheckpointError

HEADER_NBYTES = 101_000_000


@pytest.fixture
def path(tmp_path):
    tensors = {f"t{number}": ("U8", (1,), bytes([number % 256])) for number in range(50_000)}
    return write(tmp_path / "m.safetensors", tensors, pad_to=HEADER_NBYTES)


def test_a_header_over_100_mb_opens(path):
    with xds.open_checkpoint(path) as checkpoint:
        assert len(checkpoint) == 50_000
        assert checkpoint.get("t49999", device="cpu").tolist() == [49_999 % 256]


def test_the_limit_is_the_callers(path):
    with pytest.raises(CheckpointError, match=f"has {HEADER_NBYTES} bytes.*max_header_nbytes={HEADER_NBYTES}"):
        xds.open_checkpoint(path, max_header_nbytes=100_000_000)
