"""fsspec#1476: open() took the brackets of a name for a pattern."""

from __future__ import annotations

import fsspec
import pytest

NAMES = ["a[1].txt", "[", "a[!b]", "*", "?", "a?b*", "{a,b}", "**", "[0-9]"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_opened_by_the_letter(fs, tmp_path, name):
    path = f"{tmp_path}/{name}"
    fs.pipe_file(path, name.encode())
    with fs.open(path) as file:
        assert file.read() == name.encode()
    assert fs.cat_file(path) == name.encode()
    assert fs.info(path)["name"] == path
    assert fs.cat_ranges([path], [0], [1]) == [name.encode()[:1]]
    with fs.open(path, "ab") as file:
        file.write(b"+")
    fs.mv(path, path + "2")
    fs.cp_file(path + "2", path)
    fs.rm(path + "2")
    assert fs.find(str(tmp_path)) == [path]


@pytest.mark.parametrize("name", NAMES)
def test_fsspec_open_without_expanding(tmp_path, name):
    (tmp_path / name).write_bytes(b"x")
    with fsspec.open(f"xds://{tmp_path}/{name}", expand=False) as file:
        assert file.read() == b"x"
