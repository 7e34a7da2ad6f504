"""gcsfs#562: isfile said what was true before a cp."""

from __future__ import annotations


def test_what_is_asked_is_true_now(fs, tmp_path):
    one, two, folder = str(tmp_path / "one"), str(tmp_path / "two"), str(tmp_path / "folder")

    def ask(path):
        return fs.exists(path), fs.isfile(path), fs.isdir(path)

    assert ask(one) == ask(two) == (False, False, False)
    fs.pipe_file(one, b"1")
    assert ask(one) == (True, True, False)
    fs.cp_file(one, two)
    assert ask(two) == (True, True, False)
    assert fs.size(two) == 1
    fs.pipe_file(two, b"22")
    assert fs.size(two) == fs.info(two)["size"] == fs.ls(str(tmp_path))[1]["size"] == 2
    fs.mv(two, folder)
    assert ask(two) == (False, False, False)
    fs.rm(folder)
    fs.mkdir(folder)
    assert ask(folder) == (True, False, True)
    fs.mv(one, folder)
    assert ask(one) == (False, False, False)
    assert ask(folder + "/one") == (True, True, False)
    fs.rm(folder, recursive=True)
    assert ask(folder) == ask(folder + "/one") == (False, False, False)
    fs.touch(folder)
    assert ask(folder) == (True, True, False)
