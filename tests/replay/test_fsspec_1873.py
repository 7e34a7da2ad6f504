"""fsspec#1873 and #1865: the listing of a folder was answered by the entry of it in its parent's listing."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("slash", ["", "/", "//"])
def test_a_folder_lists_what_is_in_it(fs, tmp_path, slash):
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    (below / "f").write_bytes(b"x")
    (tmp_path / "empty").mkdir()
    for _ in range(2):
        assert [one["name"] for one in fs.ls(str(tmp_path) + slash)] == [f"{tmp_path}/a", f"{tmp_path}/empty"]
        assert fs.ls(f"{tmp_path}/a{slash}", detail=False) == [str(below)]
        assert fs.ls(str(below) + slash, detail=False) == [f"{below}/f"]
        assert fs.ls(f"{tmp_path}/empty{slash}") == []
        assert fs.info(f"{tmp_path}/a{slash}")["type"] == "directory"
    # Of a file, the file itself.
    assert fs.ls(f"{below}/f") == [fs.info(f"{below}/f")]
    with pytest.raises(FileNotFoundError):
        fs.ls(f"{tmp_path}/no{slash}")
