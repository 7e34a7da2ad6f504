"""sglang#22701 (also #32896, #37371).

A tensor kept past its step of the iterator was overwritten. Each is the caller's.
"""

from __future__ import annotations

from checkpoint_files import noise, write

import xds


def test_tensors_kept_from_a_stream(tmp_path):
    data = {f"t{number}": noise(1 << 20, number) for number in range(40)}
    path = write(tmp_path / "m.safetensors", {name: ("U8", (len(text),), text) for name, text in data.items()})
    with xds.open_checkpoint(path) as checkpoint:
        kept = dict(checkpoint.stream(device="cpu"))
        again = dict(checkpoint.stream(device="cpu"))
        kept["t3"][:] = 0
    assert all(kept[name].tobytes() == text for name, text in data.items() if name != "t3")
    assert all(again[name].tobytes() == text for name, text in data.items())
