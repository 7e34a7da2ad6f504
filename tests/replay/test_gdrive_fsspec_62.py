"""gdrive-fsspec#62: invalidate_cache did nothing, so listings stayed as they were."""

from __future__ import annotations

import pytest

from xds.filesystem import XdsFileSystem


@pytest.mark.parametrize("options", [{}, {"use_listings_cache": True, "listings_expiry_time": 3600}])
def test_listings_are_never_old(tmp_path, options):
    fs = XdsFileSystem(**options)
    assert fs.ls(str(tmp_path)) == []
    for number in range(3):
        (tmp_path / str(number)).write_bytes(bytes(number))
        assert [one["size"] for one in fs.ls(str(tmp_path))] == list(range(number + 1))
        assert len(fs.find(str(tmp_path))) == len(fs.glob(f"{tmp_path}/*")) == number + 1
    (tmp_path / "0").unlink()
    assert len(fs.ls(str(tmp_path), refresh=False)) == 2
    fs.invalidate_cache()
    fs.invalidate_cache(str(tmp_path))
    with fs.transaction:
        fs.invalidate_cache(str(tmp_path))
    assert len(fs.ls(str(tmp_path))) == 2
    assert fs.dircache == {}
