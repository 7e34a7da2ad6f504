"""safetensors#783: packed fp4. An odd count of values is refused with both numbers; an even one comes whole."""

from __future__ import annotations

import pytest
from checkpoint_files import one, write

import xds
from xds.errors import CheckpointError


@pytest.mark.parametrize(("shape", "values"), [([3], 3), ([5, 3], 15), ([], 1)])
def test_an_odd_count(tmp_path, shape, values):
    (tmp_path / "m.safetensors").write_bytes(one("F4", shape, b"x" * (values // 2 + 1)))
    with pytest.raises(CheckpointError, match=f"'t': {values} values of F4 are {4 * values} bits"):
        xds.load(tmp_path / "m.safetensors", device="cpu")


def test_packed_values_come_as_they_are_stored(tmp_path):
    path = write(tmp_path / "m.safetensors", {"t": ("F4", (2, 4), b"\x10\x32\x54\x76")})
    loaded = xds.load(path, device="cpu")
    assert loaded["t"].tolist() == [0x10, 0x32, 0x54, 0x76]
    assert loaded.dtypes == {"t": "F4"}
    assert loaded.raw == {"t"}
    with xds.open_checkpoint(path) as checkpoint:
        assert checkpoint.info("t").shape == (2, 4)


def test_torch_rows_can_be_taken(tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("this torch has no float4_e2m1fn_x2")
    path = write(tmp_path / "m.safetensors", {"t": ("F4", (2, 4), b"\x10\x32\x54\x76")})
    tensor = xds.load(path, device="cpu", framework="torch")["t"]
    assert tensor.shape == (2, 2)
    assert tensor[1].view(torch.uint8).tolist() == [0x54, 0x76]
