"""fsspec#1321: copying what "**" matches made folders that nothing was copied into."""

from __future__ import annotations

import pytest


def tree(path):
    return sorted(str(one.relative_to(path)) + "/" * one.is_dir() for one in path.rglob("*"))


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "empty").mkdir()
    for name in ("1.txt", "2.bin", "a/3.txt", "a/b/4.txt"):
        (folder / name).write_bytes(name.encode())
    return folder


@pytest.mark.parametrize("name", ["copy", "get", "put"])
@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.txt", ["1.txt"]),
        ("**/*.txt", ["1.txt", "a/", "a/3.txt", "a/b/", "a/b/4.txt"]),
        ("a/**", ["3.txt", "b/", "b/4.txt"]),
        ("*", ["1.txt", "2.bin"]),
    ],
)
def test_only_folders_of_what_is_copied_are_made(source, tmp_path, name, pattern, expected):
    from xds.filesystem import XdsFileSystem

    getattr(XdsFileSystem(auto_mkdir=True), name)(f"{source}/{pattern}", f"{tmp_path}/target/")
    assert tree(tmp_path / "target") == expected
