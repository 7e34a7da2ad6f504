"""fsspec#554 and adlfs#188: a slash at the end of a path made another path of it."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("slash", ["", "/", "//", "/.", "/./", "/x/.."])
def test_a_slash_at_the_end_changes_nothing(fs, tmp_path, slash):
    (tmp_path / "folder").mkdir()
    path = str(tmp_path / "folder")
    given = path + slash
    assert fs.info(given) == fs.info(path)
    assert fs.info(given)["name"] == path
    assert fs.isdir(given)
    assert fs.exists(given)
    fs.pipe_file(f"{given}/file", b"x")
    assert fs.ls(given) == fs.ls(path)
    assert fs.find(given) == [f"{path}/file"]
    assert [step[0] for step in fs.walk(given)] == [path]
    assert fs.du(given) == 1
    assert fs._parent(given) == str(tmp_path)
    fs.mkdir(f"{path}/new{slash}")
    assert fs.isdir(f"{path}/new")
    fs.mv(f"{path}/new{slash}", f"{path}/moved{slash}")
    assert fs.isdir(f"{path}/moved")
    fs.rm(given, recursive=True)
    assert not fs.exists(path)


def test_the_names_of_listings_have_none(fs, tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    names = fs.ls(f"{tmp_path}/", detail=False) + fs.find(f"{tmp_path}/", withdirs=True) + fs.glob(f"{tmp_path}/**")
    assert not [name for name in names if name.endswith("/")]
