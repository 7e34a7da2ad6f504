"""fsspec#838: names with brackets were lost by expand_path, get and put: taken for patterns that match nothing."""

from __future__ import annotations

import os

import pytest

NAMES = ["a[1].txt", "data[x", "b[!c]", "year=[2020]"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_looks_like_a_pattern(fs, tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"x")
    assert fs.expand_path(str(path)) == [str(path)]
    assert fs.expand_path([str(path), str(tmp_path / "*")]) == [str(path)]
    assert fs.cat(str(path)) == b"x"
    fs.get(str(path), str(tmp_path / "got"))
    fs.put(str(path), str(tmp_path / "put"))
    fs.copy(str(path), str(tmp_path / "copy"))
    assert [(tmp_path / one).read_bytes() for one in ("got", "put", "copy")] == [b"x"] * 3
    (tmp_path / "into").mkdir()
    for call in (fs.get, fs.put, fs.copy):
        call(str(path), str(tmp_path / "into"))
        assert os.listdir(tmp_path / "into") == [name]
        fs.rm(str(tmp_path / "into" / name))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("slash", ["", "/"])
def test_a_folder_that_looks_like_a_pattern(fs, tmp_path, name, slash):
    (tmp_path / name / "below").mkdir(parents=True)
    (tmp_path / name / "below" / name).write_bytes(b"x")
    for number, call in enumerate((fs.get, fs.put, fs.copy)):
        target = tmp_path / f"new{number}"
        call(str(tmp_path / name) + slash, str(target), recursive=True)
        assert (target / "below" / name).read_bytes() == b"x"
        call(str(tmp_path / name) + slash, str(target), recursive=True)
        expected = ["below"] if slash else sorted(["below", name])
        assert sorted(os.listdir(target)) == expected
        call(str(tmp_path / name), str(tmp_path / "no"))  # not recursive: nothing, as for all folders
        assert not (tmp_path / "no").exists()


def test_a_pattern_that_matches_is_a_pattern(fs, tmp_path):
    for name in ("a[1]", "a1"):
        (tmp_path / name).write_bytes(name.encode())
    assert fs.expand_path(str(tmp_path / "a[1]")) == [str(tmp_path / "a1")]
    assert fs.expand_path(str(tmp_path / "a[[]1]")) == [str(tmp_path / "a[1]")]
    with pytest.raises(FileNotFoundError):
        fs.expand_path(str(tmp_path / "b[1]"))
