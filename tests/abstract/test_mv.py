"""fsspec's tests of mv are written for its local files alone; these are the same for ours."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def fs(made):
    return made()


def test_move_into_a_missing_folder(fs, tmp_path):
    source = tmp_path / "source_file.txt"
    source.write_text("content")
    with pytest.raises(FileNotFoundError):
        fs.mv(str(source), str(tmp_path / "no" / "destination_file.txt"))
    assert source.read_text() == "content"


@pytest.mark.parametrize("recursive", [True, False])
def test_move_into_a_protected_folder(tmp_path, recursive, as_nobody):
    source = tmp_path / "source_file.txt"
    source.write_text("content")
    protected = tmp_path / "protected_directory"
    protected.mkdir(mode=0o555)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        os.chmod(folder, 0o755)  # noqa: PTH101 (a loop of three)

    def check():
        # The loop of the fixtures runs in the parent.
        from xds.filesystem import XdsFileSystem

        with pytest.raises(PermissionError):
            XdsFileSystem().mv(str(source), str(protected / "destination_file.txt"), recursive=recursive)

    assert as_nobody(check) == 0
    assert source.read_text() == "content"
    assert list(protected.iterdir()) == []
