"""fsspec#1322: glob("dir/") forgot the slash: with one, folders alone are meant."""

from __future__ import annotations

import glob as python_glob
import os

import pytest

PATTERNS = ["*/", "*", "**/", "**", "a/", "a/*/", "f/", "a*/", "*/*", "**/*/", "nothing*/"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_slash_at_the_end_means_folders(fs, tmp_path, pattern):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "f").write_bytes(b"")
    (tmp_path / "f").write_bytes(b"")
    found = fs.glob(f"{tmp_path}/{pattern}")
    python = python_glob.glob(  # noqa: PTH207 (the oracle)
        f"{tmp_path}/{pattern}", recursive=True, include_hidden=True
    )
    if "*" in pattern:
        assert found == sorted({one.rstrip("/") for one in python})
        assert not pattern.endswith("/") or all(os.path.isdir(one) for one in found)  # noqa: PTH112 (text)
    else:
        # A plain name is looked up as all paths are: the slash is no part of it.
        assert found == [f"{tmp_path}/{pattern.rstrip('/')}"]
