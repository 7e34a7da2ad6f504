"""ServerlessLLM#318: O_DIRECT on a tmpfs gave EINVAL. Such files are read another way."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from checkpoint_files import noise, write

import xds

SHM = Path("/dev/shm")


@pytest.mark.skipif(not SHM.is_dir(), reason="no /dev/shm on this machine")
def test_a_file_in_memory():
    data = noise((5 << 20) + 77)
    with tempfile.TemporaryDirectory(dir=SHM) as folder:
        path = write(Path(folder) / "m.safetensors", {"t": ("U8", (len(data),), data)})
        loaded = xds.load(path, device="cpu")
    assert loaded["t"].tobytes() == data
    assert not {"direct", "uring"} & {method for method, nbytes in loaded.report.method.items() if nbytes}
