from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from xds.checkpoint.layout import ALIGNMENT, plan_blocks
from xds.plan import GAP_WRITABLE

SIZES = st.lists(st.sampled_from([0, 1, 2, 10, 255, 256, 257, 512, 1000, 1024, 4096, 5000]), max_size=40)


def plan(sizes, file=None, offset=None, block_nbytes=4096):
    nbytes = np.array(sizes, np.uint64)
    if offset is None:
        offset = np.cumsum(nbytes, dtype=np.uint64) - nbytes + np.uint64(100)
    file = np.zeros(len(sizes), np.uint32) if file is None else np.array(file, np.uint32)
    return list(plan_blocks(file, np.array(offset, np.uint64), nbytes, block_nbytes=block_nbytes))


@given(SIZES, st.integers(0, 2**32))
def test_every_tensor_gets_exactly_its_bytes(sizes, seed):
    source = np.random.default_rng(seed).integers(0, 256, 100 + sum(sizes), np.uint8)
    at, position = 100, 0
    for block in plan(sizes):
        assert block.first == position
        memory = np.zeros(block.nbytes, np.uint8)
        written = np.zeros(block.nbytes, bool)
        for segment in block.segments:
            low, nbytes, begin = (int(segment[key]) for key in ("destination", "nbytes", "offset"))
            assert nbytes > 0
            assert not written[low : low + nbytes].any()
            written[low : low + nbytes] = True
            memory[low : low + nbytes] = source[begin : begin + nbytes]
        for size, offset in zip(sizes[block.first : block.last], block.offsets.tolist(), strict=True):
            assert offset % ALIGNMENT == 0
            assert offset + size <= block.nbytes
            assert written[offset : offset + size].all()
            assert bytes(memory[offset : offset + size]) == bytes(source[at : at + size])
            at += size
        assert written.sum() == sum(sizes[block.first : block.last])
        assert block.nbytes <= 4096 or block.last == block.first + 1
        position = block.last
    assert position == len(sizes)


@given(SIZES)
def test_gaps_that_may_be_written_are_padding(sizes):
    for block in plan(sizes):
        end = None
        for number, segment in enumerate(block.segments):
            low = int(segment["destination"])
            assert bool(segment["flags"] & GAP_WRITABLE) == (number > 0)
            if end is not None:
                assert 0 <= low - end < ALIGNMENT
            end = low + int(segment["nbytes"])


def test_aligned_neighbours_travel_in_one_segment():
    (block,) = plan([1024] * 1000, block_nbytes=1 << 30)
    assert len(block.segments) == 1
    assert block.segments["nbytes"][0] == 1024_000


def test_neighbours_apart_in_the_file_do_not_merge():
    (block,) = plan([256, 256], offset=[0, 512])
    assert block.segments["offset"].tolist() == [0, 512]
    assert block.segments["destination"].tolist() == [0, 256]


def test_neighbours_of_different_files_do_not_merge():
    (block,) = plan([256, 256], file=[0, 1], offset=[0, 256])
    assert block.segments["file"].tolist() == [0, 1]


def test_a_big_tensor_has_a_block_of_its_own():
    blocks = plan([256, 100_000, 256])
    assert [(block.first, block.last) for block in blocks] == [(0, 1), (1, 2), (2, 3)]
    assert blocks[1].nbytes == 100_096


def test_destinations_move_with_the_block():
    (block,) = plan([10, 10])
    assert block.segments_at(0x10000)["destination"].tolist() == [0x10000, 0x10100]
    assert block.segments["destination"].tolist() == [0, 256]


def test_only_empty_tensors():
    (block,) = plan([0, 0, 0])
    assert len(block.segments) == 0
    assert block.nbytes == ALIGNMENT
    assert block.offsets.tolist() == [0, 0, 0]


def test_no_tensor():
    assert plan([]) == []
