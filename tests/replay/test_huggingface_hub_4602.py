"""huggingface_hub#4602: headers of nearly 100,000 bytes lost their last 8 bytes, those of the length."""

from __future__ import annotations

import pytest
from checkpoint_files import write

import xds


@pytest.mark.parametrize(
    "header_nbytes", [99_990, 99_992, 99_994, 99_999, 100_000, 100_001, 100_008, 65_528, 65_536, 1 << 20]
)
def test_headers_around_round_sizes(tmp_path, header_nbytes):
    data = {f"t{number}": ("U8", (2,), bytes([number, 255 - number])) for number in range(100)}
    path = write(tmp_path / "m.safetensors", data, pad_to=header_nbytes)
    loaded = xds.load(path, device="cpu")
    assert {name: array.tobytes() for name, array in loaded.items()} == {
        n: stored for n, (_, _, stored) in data.items()
    }
