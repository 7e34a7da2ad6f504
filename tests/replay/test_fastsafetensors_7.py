"""fastsafetensors#7 (also #3, InstantTensor#1, flashpack#33).

O_DIRECT was chosen for files that were in the page cache.
"""

from __future__ import annotations

from checkpoint_files import noise, write

import xds


def test_a_resident_file_is_not_read_from_the_disk(tmp_path):
    data = noise(24 << 20)
    path = write(tmp_path / "m.safetensors", {"t": ("U8", (len(data),), data)})
    assert path.read_bytes()[-1] == data[-1]
    report = xds.load(path, device="cpu").report
    assert report.resident is None or report.resident == 1.0
    assert not {"direct", "uring"} & {method for method, nbytes in report.method.items() if nbytes}
