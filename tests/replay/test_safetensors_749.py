"""safetensors#749 (also imp#1603).

A product that wraps passed as a small size; an unknown dtype skipped the checks.
"""

from __future__ import annotations

import pytest
from checkpoint_files import one

import xds
from xds.errors import CheckpointError


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes"),
    [
        ("F4", [2**62 + 2], 1),
        ("F4", [2**63], 0),
        ("U8", [2**32, 2**32], 0),
        ("F64", [2**61 + 1], 8),
        ("F32", [2**31, 2**31, 2], 0),
    ],
)
def test_products_that_wrap(tmp_path, dtype, shape, nbytes):
    (tmp_path / "m.safetensors").write_bytes(one(dtype, shape, b"x" * nbytes))
    with pytest.raises(CheckpointError, match=f"'t'.*{dtype} is more than {2**64 - 1} bits.*hold {nbytes} bytes"):
        xds.load(tmp_path / "m.safetensors", device="cpu")


def test_an_unknown_dtype(tmp_path):
    (tmp_path / "m.safetensors").write_bytes(one("Q4_K", [10**6], b"x"))
    with pytest.raises(CheckpointError, match="'t': unknown dtype 'Q4_K'"):
        xds.load(tmp_path / "m.safetensors", device="cpu")
