"""lattice#752 (also openasr#73): overlapping ranges made silent aliases; a length near 2^63 sized an allocation."""

from __future__ import annotations

import resource

import pytest
from checkpoint_files import entry, raw

import xds
from xds.errors import CheckpointError


def test_overlap_and_alias(tmp_path):
    for places, words in (([(0, 4), (2, 6)], "overlaps"), ([(0, 6), (2, 4)], "overlaps"), ([(0, 6), (0, 6)], "alias")):
        members = ", ".join(
            f'"{name}": {entry("U8", [e - b], b, e)}' for name, (b, e) in zip("ab", places, strict=True)
        )
        (tmp_path / "m.safetensors").write_bytes(raw(f"{{{members}}}", b"x" * 6))
        with pytest.raises(CheckpointError, match=words):
            xds.load(tmp_path / "m.safetensors", device="cpu")


@pytest.mark.parametrize("length", [2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1, 2**40])
def test_a_length_beyond_the_file_allocates_nothing(tmp_path, length):
    (tmp_path / "m.safetensors").write_bytes(raw("{}", length=length))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=f"header of {length} bytes.*has 10"):
        xds.load(tmp_path / "m.safetensors", device="cpu")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
