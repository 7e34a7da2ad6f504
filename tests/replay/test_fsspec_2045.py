"""fsspec#2045 and pyfive#250: on_error was ignored, and exceptions in the list were used as data."""

from __future__ import annotations

import asyncio

import pytest

from xds.filesystem import XdsFileSystem


@pytest.fixture(params=["sync", "async"])
def cat_ranges(request):
    if request.param == "sync":
        return XdsFileSystem().cat_ranges
    return lambda *args, **kwargs: asyncio.run(XdsFileSystem(asynchronous=True)._cat_ranges(*args, **kwargs))


@pytest.mark.parametrize("nbytes", [10, 2 << 20])
def test_on_error(cat_ranges, tmp_path, nbytes):
    good, missing, folder = str(tmp_path / "f"), str(tmp_path / "no"), str(tmp_path)
    (tmp_path / "f").write_bytes(bytes(nbytes))
    paths = [good, missing, folder, good, missing + "/x"]
    found = cat_ranges(paths, 0, None)
    assert [type(one) for one in found] == [bytes, FileNotFoundError, IsADirectoryError, bytes, FileNotFoundError]
    assert found == cat_ranges(paths, 0, None, on_error="return")[:0] + found
    with pytest.raises(FileNotFoundError) as caught:
        cat_ranges(paths, 0, None, on_error="raise")
    assert caught.value.filename == missing
    for wrong in ("omit", "ignore", None, True):
        with pytest.raises(ValueError, match="on_error"):
            cat_ranges([good], 0, 1, on_error=wrong)
    # A mistake of the caller is never data.
    with pytest.raises(TypeError):
        cat_ranges([good], [0.5], [1])
    with pytest.raises(ValueError, match="starts"):
        cat_ranges([good], [0, 1], [1])
