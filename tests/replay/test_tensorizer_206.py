"""tensorizer#206: a complex64 tensor came back as bfloat16. The stored type is kept, or stated."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from checkpoint_files import write

import xds


def test_the_type_is_kept(tmp_path):
    values = np.array([1 + 2j, -3.5j], np.complex64)
    halves = np.array([1, -2, 3], ml_dtypes.bfloat16)
    path = write(
        tmp_path / "m.safetensors", {"c": ("C64", (2,), values.tobytes()), "b": ("BF16", (3,), halves.tobytes())}
    )
    loaded = xds.load(path, device="cpu")
    assert loaded["c"].dtype == np.complex64
    assert loaded["c"].tolist() == values.tolist()
    assert loaded["b"].dtype == ml_dtypes.bfloat16
    assert loaded["b"].astype(float).tolist() == [1, -2, 3]
    assert loaded.dtypes == {"c": "C64", "b": "BF16"}
