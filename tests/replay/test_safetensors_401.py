"""safetensors#401.

A tensor that stands twice gave a misleading offset error, or loaded silently with the last one.
"""

from __future__ import annotations

import pytest
from checkpoint_files import entry, raw

import xds
from xds.errors import CheckpointError


@pytest.mark.parametrize(
    "places",
    [[(0, 4), (0, 4)], [(0, 4), (4, 8)], [(4, 8), (0, 4)], [(0, 8), (0, 4)]],
    ids=["alias", "tile", "back", "overlap"],
)
def test_a_duplicate_is_called_a_duplicate(tmp_path, places):
    members = ", ".join(f'"w": {entry("U8", [end - begin], begin, end)}' for begin, end in places)
    (tmp_path / "m.safetensors").write_bytes(raw(f"{{{members}}}", b"x" * 8))
    with pytest.raises(CheckpointError, match="duplicate key 'w'"):
        xds.load(tmp_path / "m.safetensors", device="cpu")
