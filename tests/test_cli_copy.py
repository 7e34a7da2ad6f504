"""``xds cp``, ``find``, ``du`` and shell completion."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import fsspec
import pytest

from xds.cli import copy as copy_command
from xds.cli import root
from xds.cli.targets import complete

XDS = [sys.executable, "-P", "-m", "xds.cli"]
BIG = bytes(range(256)) * (80 << 10)  # 20 MiB: several pieces


def call(capfd, *arguments):
    code = root.run([str(word) for word in arguments])
    out, err = capfd.readouterr()
    return code, out, err


@pytest.fixture
def tree(tmp_path):
    """A folder with all that is awkward."""
    top = tmp_path / "tree"
    (top / "sub" / "deep").mkdir(parents=True)
    (top / "hollow").mkdir()
    (top / "a.bin").write_bytes(b"a" * 1000)
    (top / "empty").write_bytes(b"")
    (top / "sub" / "b 1.txt").write_bytes(b"b" * 200)
    (top / "sub" / "deep" / "c[1]#?%20.txt").write_bytes(b"c" * 30)
    return top


@pytest.fixture
def memory():
    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    filesystem.pseudo_dirs[:] = [""]
    yield filesystem
    filesystem.store.clear()
    filesystem.pseudo_dirs[:] = [""]


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(Path(folder).rglob("*"))
    }


# cp


@pytest.mark.parametrize("source", ["{}", "xds://{}", "file://{}"])
@pytest.mark.parametrize("target", ["{}", "xds://{}", "file://{}"])
def test_cp_of_a_file(capfd, tmp_path, source, target):
    (tmp_path / "from").write_bytes(BIG)
    code, out, err = call(capfd, "cp", source.format(tmp_path / "from"), target.format(tmp_path / "to"))
    assert (code, err) == (0, "")
    assert "1 file, 21.0 MB in " in out
    assert (tmp_path / "to").read_bytes() == BIG
    assert sorted(os.listdir(tmp_path)) == ["from", "to"]


def test_cp_to_and_from_another_file_system(capfd, tmp_path, memory):
    (tmp_path / "from").write_bytes(BIG)
    assert call(capfd, "cp", tmp_path / "from", "memory://store/model")[0] == 0
    assert memory.cat("/store/model") == BIG
    assert call(capfd, "cp", "memory://store/model", f"xds://{tmp_path}/back")[0] == 0
    assert (tmp_path / "back").read_bytes() == BIG
    assert call(capfd, "cp", "memory://store/model", "memory://store/again")[0] == 0
    assert memory.cat("/store/again") == BIG


@pytest.mark.parametrize("target", ["{}/folder", "{}/folder/", "{}/new/", "xds://{}/folder"])
def test_cp_into_a_folder(capfd, tmp_path, target):
    (tmp_path / "one").write_bytes(b"1")
    (tmp_path / "two 2").write_bytes(b"2")
    (tmp_path / "folder").mkdir()
    code, out, _ = call(capfd, "cp", tmp_path / "one", tmp_path / "two 2", target.format(tmp_path))
    assert code == 0
    assert "2 files" in out
    folder = tmp_path / ("new" if "new" in target else "folder")
    assert contents(folder) == {"one": b"1", "two 2": b"2"}


def test_cp_of_a_folder(capfd, tmp_path, tree):
    assert call(capfd, "cp", "-r", tree, tmp_path / "copy")[0] == 0
    assert contents(tmp_path / "copy") == contents(tree)
    assert call(capfd, "cp", "-r", f"file://{tree}", tmp_path / "copy")[0] == 0  # it exists now: into it
    assert contents(tmp_path / "copy" / "tree") == contents(tree)


def test_cp_of_a_folder_to_memory_and_back(capfd, tmp_path, tree, memory):
    assert call(capfd, "cp", "-r", tree, "memory://copy")[0] == 0
    assert call(capfd, "cp", "-r", "memory://copy", tmp_path / "back")[0] == 0
    assert contents(tmp_path / "back") == contents(tree)


def test_cp_as_json(capfd, tmp_path, tree):
    code, out, err = call(capfd, "cp", "-r", "--json", tree, tmp_path / "copy")
    values = json.loads(out)
    assert (code, err) == (0, "")
    assert (values["files"], values["nbytes"]) == (4, 1230)
    assert {"seconds", "gb_per_s", "copied"} <= set(values)
    first = values["copied"][0]
    assert first == {"source": f"xds://{tree}/a.bin", "destination": f"xds://{tmp_path}/copy/a.bin", "nbytes": 1000}


def test_cp_of_nothing_and_of_an_empty_folder(capfd, tmp_path):
    (tmp_path / "none").mkdir()
    code, out, _ = call(capfd, "cp", "-r", tmp_path / "none", tmp_path / "copy")
    assert code == 0
    assert "0 files, 0 B" in out
    assert (tmp_path / "copy").is_dir()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["{}/nothing", "{}/x"], "nothing"),
        (["{}/tree", "{}/x"], "--recursive"),
        (["{}/tree/a.bin", "{}/tree/empty", "{}/x"], "several sources"),
        (["{}/tree/a.bin", "{}/tree/empty", "{}/tree/a.bin"], "several sources"),
        (["-r", "{}/tree", "{}/tree/sub"], "into itself"),
        (["-r", "{}/tree", "{}/tree/other"], "into itself"),
        (["{}/tree/a.bin", "{}/tree/a.bin"], "same file"),
        (["{}/tree/a.bin", "{}/tree"], "same file"),
        (["{}/tree/a.bin", "{}/no/such/folder"], "no/such"),
        (["{}/tree/a.bin", "{}/tree/empty/x"], "empty"),
        (["{}/tree/a.bin", "nosuch://x"], "nosuch"),
    ],
)
def test_what_cp_refuses_is_one_line_and_changes_nothing(capfd, tmp_path, tree, words, told):
    before = contents(tmp_path)
    code, out, err = call(capfd, "cp", *(word.format(tmp_path) for word in words))
    assert (code, out) == (1, "")
    assert err.startswith("xds: error: ")
    assert told in err
    assert len(err.splitlines()) == 1
    assert contents(tmp_path) == before


@pytest.mark.parametrize("words", [["cp"], ["cp", "x"], ["find", "--type", "socket"], ["du", "--maxdepth", "-1"]])
def test_wrong_usage_is_exit_code_2(capfd, words):
    assert call(capfd, *words)[0] == 2


@pytest.mark.parametrize("source", ["file://{}", "{}"])
def test_a_source_that_shrinks_leaves_the_old_destination(capfd, tmp_path, monkeypatch, source):
    (tmp_path / "from").write_bytes(BIG)
    (tmp_path / "to").write_bytes(b"old")
    real = copy_command._plan

    def shrink(*arguments):
        plan = real(*arguments)
        os.truncate(tmp_path / "from", 5 << 20)
        return plan

    monkeypatch.setattr(copy_command, "_plan", shrink)
    memory_target = "memory://shrunk" if source == "{}" else tmp_path / "to"
    code, _, err = call(capfd, "cp", source.format(tmp_path / "from"), memory_target)
    assert code == 1
    assert "shrank" in err
    assert (tmp_path / "to").read_bytes() == b"old"
    assert sorted(os.listdir(tmp_path)) == ["from", "to"]
    assert not fsspec.filesystem("memory").exists("/shrunk")


def test_ctrl_c_leaves_the_old_destination(tmp_path):
    with (tmp_path / "from").open("wb") as file:
        file.truncate(1 << 40)
    (tmp_path / "to").write_bytes(b"old")
    words = [f"file://{tmp_path}/from", f"{tmp_path}/to"]
    process = subprocess.Popen([*XDS, "cp", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        # Written to a file without a name: that it writes shows in its own counts alone.
        deadline = time.monotonic() + 60
        counts = Path(f"/proc/{process.pid}/io")
        while int(re.search(r"wchar: (\d+)", counts.read_text())[1]) < 32 << 20 and time.monotonic() < deadline:
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, out) == (130, b"")
    assert b"Traceback" not in err
    assert sorted(os.listdir(tmp_path)) == ["from", "to"]
    assert (tmp_path / "to").read_bytes() == b"old"


def test_cp_draws_progress_on_a_terminal(tmp_path):
    (tmp_path / "from").write_bytes(BIG)
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [*XDS, "cp", f"file://{tmp_path}/from", str(tmp_path / "to")],
        stdout=subprocess.DEVNULL,
        stderr=slave,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(slave)
    drawn = b""
    while True:
        try:
            piece = os.read(master, 65536)
        except OSError:
            break
        if not piece:
            break
        drawn += piece
    os.close(master)
    assert process.wait(60) == 0
    assert b"from" in drawn


# find


def test_find(capfd, tree):
    code, out, err = call(capfd, "find", tree)
    assert (code, err) == (0, "")
    below = ["/", "/a.bin", "/empty", "/hollow/", "/sub/", "/sub/b 1.txt", "/sub/deep/", "/sub/deep/c[1]#?%20.txt"]
    assert sorted(out.splitlines()) == [f"{tree}{name}" for name in below]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--name", "*.txt"], ["b 1.txt", "c[1]#?%20.txt"]),
        (["--name", "*.bin", "--name", "empty"], ["a.bin", "empty"]),
        (["--type", "directory"], ["deep", "hollow", "sub", "tree"]),
        (["--type", "file", "--maxdepth", "1"], ["a.bin", "empty"]),
        (["--maxdepth", "0"], ["tree"]),
        (["--maxdepth", "2", "--type", "file"], ["a.bin", "b 1.txt", "empty"]),
        (["--name", "nothing"], []),
    ],
)
@pytest.mark.parametrize("target", ["{}", "file://{}"])
def test_find_with_options(capfd, tree, options, names, target):
    code, out, _ = call(capfd, "find", target.format(tree), *options, "--json")
    assert code == 0
    assert sorted(Path(entry["name"]).name for entry in json.loads(out)) == names


def test_find_of_a_file_and_with_nul(capfdbinary, tmp_path):
    odd = os.fsencode(tmp_path) + b"/new\nline\xff"
    Path(os.fsdecode(odd)).write_bytes(b"")
    assert root.run(["find", "-0", os.fsdecode(odd)]) == 0
    assert capfdbinary.readouterr().out == odd + b"\0"
    assert root.run(["find", "--type", "file", str(tmp_path)]) == 0
    assert capfdbinary.readouterr().out.count(b"\n") == 1


def test_what_cannot_be_listed_is_told_and_the_rest_is_found(capfd, tree, as_nobody):
    (tree / "sub").chmod(0o700)
    for parent in [tree, *tree.parents[:4]]:
        parent.chmod(0o755)

    def nobody():
        assert root.run(["find", str(tree)]) == 1
        assert root.run(["du", str(tree)]) == 1

    code = as_nobody(nobody)
    out, err = capfd.readouterr()
    assert code == 0
    assert f"{tree}/a.bin\n" in out
    assert "hollow/" in out
    assert len(err.splitlines()) == 2
    assert err.startswith("xds: error: ")
    assert "sub" in err


def test_a_folder_that_cannot_be_listed_is_not_left_out_of_a_copy(capfd, tree, memory, as_nobody):
    # What a copy imports must be there already: nobody may not read this Python's folders.
    assert call(capfd, "cp", "-r", tree, "memory://whole")[0] == 0
    (tree / "sub" / "deep").chmod(0o700)
    for parent in [tree, *tree.parents[:4]]:
        parent.chmod(0o755)

    def nobody():
        assert root.run(["cp", "-r", str(tree), "memory://partial"]) == 1
        assert not memory.exists("/partial")

    assert as_nobody(nobody) == 0
    out, err = capfd.readouterr()
    assert out == ""
    assert "deep" in err


def test_links_are_listed_and_not_entered(capfd, tree):
    (tree / "sub" / "up").symlink_to(tree)
    code, out, _ = call(capfd, "find", tree)
    assert code == 0
    assert len(out.splitlines()) == 9


# du


def test_du(capfd, tree):
    code, out, err = call(capfd, "du", tree)
    assert (code, err) == (0, "")
    lines = dict(reversed(line.split(maxsplit=1)) for line in out.splitlines())
    expected = {f"{tree}": "1230", f"{tree}/sub": "230", f"{tree}/sub/deep": "30", f"{tree}/hollow": "0"}
    assert lines == expected
    assert out.splitlines()[-1].endswith(str(tree))


def test_du_with_options(capfd, tree):
    code, out, _ = call(capfd, "du", "-h", "--total", "--maxdepth", "0", tree, tree / "a.bin")
    assert code == 0
    assert [line.split() for line in out.splitlines()] == [
        ["1.2", "kB", str(tree)],
        ["1.0", "kB", f"{tree}/a.bin"],
        ["2.2", "kB", "total"],
    ]
    code, out, _ = call(capfd, "du", "-d", "1", tree)
    assert len(out.splitlines()) == 3
    code, out, _ = call(capfd, "du", "--json", "--total", f"file://{tree}")
    assert json.loads(out)["total"] == 1230
    assert {Path(entry["name"]).name: entry["nbytes"] for entry in json.loads(out)["entries"]} == {
        "tree": 1230,
        "sub": 230,
        "deep": 30,
        "hollow": 0,
    }


def test_du_agrees_with_the_file_system(capfd, tree, fs, monkeypatch):
    monkeypatch.chdir(tree)
    _, out, _ = call(capfd, "du", "--json", "--maxdepth", "0")
    assert [entry["nbytes"] for entry in json.loads(out)] == [fs.du(str(tree))]


@pytest.mark.parametrize("command", ["find", "du"])
def test_of_what_is_not_there(capfd, tmp_path, command):
    code, out, err = call(capfd, command, tmp_path / "nothing")
    assert (code, out) == (1, "")
    assert "nothing" in err


@pytest.mark.parametrize("command", ["cp", "find", "du"])
def test_each_command_has_help(capfd, command):
    code, out, _ = call(capfd, command, "--help")
    assert code == 0
    assert "Usage: xds" in out


# Completion.


def test_completion_is_installed_and_shown(tmp_path):
    env = {**os.environ, "HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = subprocess.run([*XDS, "--install-completion", "bash"], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    script = tmp_path / ".bash_completions" / "xds.sh"
    assert "_XDS_COMPLETE=complete_bash" in script.read_text()
    assert str(script) in (tmp_path / ".bashrc").read_text()
    done = subprocess.run([*XDS, "--show-completion", "zsh"], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "#compdef xds" in done.stdout


def completed(words, number, cwd):
    env = {**os.environ, "_XDS_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(number)}
    done = subprocess.run(XDS, env=env, capture_output=True, text=True, timeout=60, cwd=cwd, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


def test_a_shell_completes_commands_options_and_names(tree):
    assert completed("xds st", 1, tree) == ["stat"]
    assert "--recursive" in completed("xds cp --re", 2, tree)
    assert completed("xds cat a", 2, tree) == ["a.bin"]
    assert completed(f"xds ls {tree}/s", 2, tree) == [f"{tree}/sub/"]


def test_completion_of_targets(tree, monkeypatch):
    monkeypatch.chdir(tree)
    assert sorted(complete("")) == ["a.bin", "empty", "hollow/", "sub/"]
    assert complete("sub/b") == ["sub/b 1.txt"]
    assert complete(f"xds://{tree}/h") == [f"xds://{tree}/hollow/"]
    assert complete(f"file://{tree}/h") == [f"file://{tree}/hollow/"]
    assert complete("no/such") == []
    (tree / ".hidden").write_bytes(b"")
    assert ".hidden" not in complete("")
    assert complete(".h") == [".hidden"]


def test_completion_never_asks_storage_that_may_take_long(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("asked")

    monkeypatch.setattr(fsspec.core, "url_to_fs", refuse)
    assert complete("s3://bucket/") == []
