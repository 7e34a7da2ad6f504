"""The command ``xds``: output, JSON, exit codes, errors, pipes, interrupts."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import xds
from xds.cli import errors, targets
from xds.cli import load as load_command
from xds.cli import root as cli

# -P: the folder that the tests run in must not stand in for the installed package.
XDS = [sys.executable, "-P", "-m", "xds.cli"]


def run(*arguments, **options):
    return subprocess.run([*XDS, *map(str, arguments)], capture_output=True, timeout=100, check=False, **options)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "data.bin").write_bytes(bytes(range(256)) * 16)
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "sub").mkdir()
    values = np.arange(1000, dtype=np.float32)
    tensors = {
        "a.weight": {"dtype": "F32", "shape": [10, 50], "data_offsets": [0, 2000]},
        "b.weight": {"dtype": "F32", "shape": [500], "data_offsets": [2000, 4000]},
    }
    header = json.dumps(tensors).encode()
    header += b" " * (-len(header) % 8)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + values.tobytes())
    return tmp_path


def call(capfd, *arguments):
    """Run in this process: quicker than a new one; returns exit code, standard output, standard error."""
    code = cli.run([str(word) for word in arguments])
    out, err = capfd.readouterr()
    return code, out, err


def test_version_and_help(capfd):
    code, out, _ = call(capfd, "--version")
    assert (code, out) == (0, f"xds {importlib.metadata.version('xpu-direct-storage')}\n")
    code, out, _ = call(capfd, "--help")
    assert code == 0
    for name in ("ls", "stat", "cat", "cp", "find", "du", "load", "doctor"):
        assert name in out
    assert "130 interrupted" in out


@pytest.mark.parametrize("command", ["ls", "stat", "cat", "load", "doctor"])
def test_each_command_has_help(capfd, command):
    code, out, _ = call(capfd, command, "--help")
    assert code == 0
    assert "Usage: xds" in out


def test_the_application_runs_in_typers_own_runner(folder):
    result = CliRunner().invoke(cli.application(), ["ls", str(folder)])
    assert result.exit_code == 0
    assert "data.bin" in result.output


@pytest.mark.parametrize("target", ["{}", "xds://{}", "file://{}"])
def test_ls(capfd, folder, target):
    code, out, err = call(capfd, "ls", target.format(folder))
    assert (code, err) == (0, "")
    assert sorted(Path(line.rstrip("/")).name for line in out.splitlines()) == [
        "data.bin",
        "empty",
        "model.safetensors",
        "sub",
    ]
    assert [line for line in out.splitlines() if line.endswith("/")] == [f"{folder}/sub/"]


def test_ls_long_and_json(capfd, folder):
    code, out, _ = call(capfd, "ls", "-l", folder)
    assert code == 0
    assert any(line.startswith("file") and "4.1 kB" in line and line.endswith("data.bin") for line in out.splitlines())
    code, out, _ = call(capfd, "ls", "--json", folder)
    assert {Path(entry["name"]).name: entry["size"] for entry in json.loads(out)}["data.bin"] == 4096


def test_ls_is_of_the_current_folder_by_default(capfd, folder, monkeypatch):
    monkeypatch.chdir(folder)
    code, out, _ = call(capfd, "ls")
    assert code == 0
    assert "data.bin" in out


@pytest.mark.parametrize("name", ["a b", "per%20cent", "quer?y#x", "new\nline", "\u202egnp.exe", "tab\t", "-dash"])
def test_odd_names(capfd, tmp_path, name):
    (tmp_path / name).write_bytes(b"odd")
    code, out, _ = call(capfd, "ls", tmp_path)
    assert code == 0
    assert len(out.splitlines()) == 1
    assert all(character.isprintable() for character in out.rstrip("\n"))
    code, out, _ = call(capfd, "cat", tmp_path / name)
    assert (code, out) == (0, "odd")


def test_names_that_are_not_text(tmp_path):
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")).write_bytes(b"x")
    done = run("ls", tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1


def test_stat(capfd, folder):
    code, out, _ = call(capfd, "stat", folder / "data.bin")
    assert code == 0
    lines = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert lines["size"] == "4096 (4.1 kB)"
    assert lines["mode"].startswith("-rw")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", lines["mtime"])
    assert "identity" not in lines
    code, out, _ = call(capfd, "stat", "--json", folder / "data.bin")
    assert json.loads(out)[0]["size"] == 4096
    code, out, _ = call(capfd, "stat", "--json", folder / "data.bin", folder / "empty")
    assert [entry["size"] for entry in json.loads(out)] == [4096, 0]


@pytest.mark.parametrize(
    ("start", "end"),
    [(None, None), (0, 0), (3, 7), (-5, None), (None, -4090), (-10, -2), (4000, 9999), (9999, None), (7, 3)],
)
def test_cat_is_binary_safe_and_slices_as_python_does(folder, start, end):
    options = [*([] if start is None else [f"--start={start}"]), *([] if end is None else [f"--end={end}"])]
    done = run("cat", folder / "data.bin", *options)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == (folder / "data.bin").read_bytes()[start:end]


def test_cat_of_several_files_and_of_none_of_their_bytes(folder):
    done = run("cat", folder / "empty", folder / "data.bin", folder / "data.bin")
    assert done.stdout == (folder / "data.bin").read_bytes() * 2


def test_cat_of_a_file_larger_than_a_piece(tmp_path):
    path = tmp_path / "large"
    with path.open("wb") as file:
        for number in range(20):
            file.write(bytes([number]) * 1_000_003)
    done = run("cat", path)
    assert hashlib.sha256(done.stdout).digest() == hashlib.sha256(path.read_bytes()).digest()


def test_a_reader_that_has_had_enough_is_no_error(tmp_path):
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(1 << 30)
    script = f'"{sys.executable}" -P -m xds.cli cat "{path}" | head -c 10 | wc -c; echo "${{PIPESTATUS[0]}}"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.split() == ["10", "0"]
    assert done.stderr == ""


def test_load(capfd, folder):
    code, out, err = call(capfd, "load", folder / "model.safetensors", "--device", "cpu")
    assert (code, err) == (0, "")
    lines = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert lines["tensors"] == "2"
    assert lines["bytes"] == "4000 (4.0 kB)"
    assert lines["posting"] == "host"
    assert lines["placement"] == "mapped"
    assert lines["GB/s"] == "-"  # too few bytes for a rate
    assert {"seconds", "GB/s", "method", "resident", "device"} <= set(lines)


def test_load_as_json_with_a_name_pattern(capfd, folder):
    url = f"xds://{folder}/model.safetensors"
    code, out, _ = call(capfd, "load", url, "--device=cpu", "--framework=numpy", "--json", "--name", "a.*")
    values = json.loads(out)
    assert code == 0
    assert (values["url"], values["tensors"], values["nbytes"]) == (url, 1, 2000)
    assert values["seconds"] == values["report"]["seconds"]["total"] <= values["seconds_with_startup"]
    assert values["gb_per_s"] == pytest.approx(2000 / values["seconds"] / 1e9)
    assert values["device"] == "cpu"
    assert values["posting"] == {"host": 2000}
    assert values["report"]["nbytes"] == 2000


def test_load_of_a_plain_relative_path(capfd, folder, monkeypatch):
    monkeypatch.chdir(folder)
    code, out, _ = call(capfd, "load", "model.safetensors", "--device", "cpu", "--require", "posting=host")
    assert code == 0
    assert "tensors" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["load", "{}/model.safetensors", "--device", "cpu", "--require", "posting=gpu"], "posting"),
        (["load", "{}/model.safetensors", "--device", "cpu", "--name", "c.*"], "'c.*' among 2; they begin with 'a.wei"),
        (["load", "xds:{}/model.safetensors", "--device", "cpu"], "did you mean xds:///"),
        (["load", "https://example.com/model.safetensors", "--device", "cpu"], "cannot read into arrays"),
        (["ls", "{}/*.nothing"], "No name matches this pattern"),
        (["ls", "xds:{}"], "did you mean xds:///"),
        (["ls", "xsd://{}"], "did you mean xds:///"),
        (["cat", "/proc/cpuinfo"], "read it with open()"),
        (["load", "{}/data.bin", "--device", "cpu"], "data.bin"),
        (["load", "{}/empty", "--device", "cpu"], "empty"),
        (["load", "{}/nothing", "--device", "cpu"], "nothing"),
        (["ls", "{}/nothing"], "nothing"),
        (["stat", "{}/nothing"], "nothing"),
        (["cat", "{}/nothing"], "nothing"),
        (["cat", "{}/sub"], "sub"),
        (["ls", "nosuch://x/y"], "nosuch"),
    ],
)
def test_a_users_error_is_one_line_and_exit_code_1(capfd, folder, arguments, words):
    code, out, err = call(capfd, *(word.format(folder) for word in arguments))
    assert code == 1
    assert out == ""
    assert err.startswith("xds: error: ")
    assert words in err
    assert "Traceback" not in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["cat"],
        ["cat", "x", "--start", "seven"],
        ["load", "x", "--require", "posting"],
        ["load", "x", "--require", "=host"],
        ["load", "x", "--device", "gpu"],
        ["load", "x", "--device", "cuda:"],
        ["load", "x", "--timeout", "soon"],
        ["--nonsense"],
    ],
)
def test_wrong_usage_is_exit_code_2(capfd, arguments):
    code, _, err = call(capfd, *arguments)
    assert code == 2
    assert "Traceback" not in err
    assert err


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--framework", "abacus"], "abacus"),
        (["--framework", "cupy"], "GPU memory"),
        (["--timeout", "0"], "above 0"),
        (["--timeout", "nan"], "above 0"),
        (["--require", "posting=nobody"], "nobody"),
    ],
)
def test_values_that_no_load_takes_are_wrong_usage(capfd, folder, options, word):
    code, out, err = call(capfd, "load", folder / "model.safetensors", "--device", "cpu", *options)
    assert (code, out) == (2, "")
    assert word in err


@pytest.mark.parametrize(
    ("word", "device"), [(None, None), ("cpu", "cpu"), ("cuda", "cuda"), ("cuda:1", 1), ("0", 0), ("12", 12)]
)
def test_devices(word, device):
    assert load_command.parse_device(word) == device


def test_patterns_choose_names():
    names = ["a.0", "a.1", "b.0"]
    assert load_command.select("u", names, []) is None
    assert load_command.select("u", names, ["*.0", "a.*"]) == ["a.0", "b.0", "a.1"]
    assert load_command.select("u", [], ["x"]) == []
    with pytest.raises(xds.errors.CheckpointError, match=r"u: no tensor matches 'c' among 3; they begin with 'a\.0'"):
        load_command.select("u", names, ["a.*", "c"])


@pytest.mark.parametrize("command", ["ls", "stat", "cat"])
def test_of_several_targets_one_that_fails_does_not_stop_the_others(capfd, folder, command):
    code, out, err = call(capfd, command, folder / "nothing", folder / "model.safetensors", folder / "none")
    assert code == 1
    assert "a.weight" in out if command == "cat" else "model.safetensors" in out
    assert [line.partition(": No such")[0] for line in err.splitlines()] == [
        f"xds: error: {folder}/nothing",
        f"xds: error: {folder}/none",
    ]


@pytest.mark.parametrize("command", ["ls", "stat"])
def test_json_is_an_array_whatever_the_targets(capfd, folder, command):
    code, out, err = call(capfd, command, "--json", folder / "empty")
    assert (code, err) == (0, "")
    assert [entry["name"] for entry in json.loads(out)] == [f"{folder}/empty"]
    code, out, err = call(capfd, command, "--json", folder / "nothing", folder / "empty")
    assert code == 1
    error, entry = json.loads(out)
    assert error == {
        "error": {
            "type": "FileNotFoundError",
            "errno": 2,
            "message": f"{folder}/nothing: No such file or directory",
            "filename": f"{folder}/nothing",
        }
    }
    assert entry["name"] == f"{folder}/empty"
    assert err == f"xds: error: {folder}/nothing: No such file or directory\n"


def test_an_error_of_a_load_is_json_too(capfd, folder):
    code, out, err = call(capfd, "load", folder / "data.bin", "--device", "cpu", "--json")
    error = json.loads(out)["error"]
    assert code == 1
    assert (error["type"], error["errno"], error["filename"]) == ("CheckpointError", 22, f"{folder}/data.bin")
    assert err == f"xds: error: {error['message']}\n"


def test_patterns_of_ls(capfd, folder):
    code, out, _ = call(capfd, "ls", f"xds://{folder}/*e*")
    assert code == 0
    assert out.splitlines() == [f"{folder}/empty", f"{folder}/model.safetensors"]
    (folder / "[a]").touch()
    assert call(capfd, "ls", folder / "[a]")[1] == f"{folder}/[a]\n"


def test_long_lists_say_where_links_lead(capfd, folder):
    (folder / "link").symlink_to("sub")
    for option in ("-l", "-lh"):
        code, out, _ = call(capfd, "ls", option, folder)
        assert code == 0
        assert [line.split("  ")[-1] for line in out.splitlines() if "->" in line] == [f"{folder}/link/ -> sub"]


def test_debug_behind_the_command_is_told_where_it_stands(capfd, folder):
    code, _, err = call(capfd, "cat", "--debug", folder / "nothing")
    assert code == 2
    assert "xds --debug COMMAND" in err


@pytest.mark.parametrize("arguments", [["ls"], ["cat", "data.bin"], ["stat", "empty"], ["doctor"]])
@pytest.mark.parametrize(("where", "reason"), [(">/dev/full", "No space left"), (">&-", "Bad file descriptor")])
def test_standard_output_that_takes_nothing(folder, arguments, where, reason):
    script = " ".join(["exec", *XDS, *arguments, where])
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=100, cwd=folder, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"xds: error: standard output: {reason}")
    assert len(done.stderr.splitlines()) == 1


def test_an_interrupt_while_modules_are_imported():
    code = (
        "import sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'typer': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from xds.cli import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "xds: interrupted\n")


def test_debug_shows_the_traceback(capfd, folder):
    code, _, err = call(capfd, "--debug", "cat", folder / "nothing")
    assert code == 1
    assert "Traceback" in err
    assert "FileNotFoundError" in err


def test_no_permission_is_told_as_such(capfd, monkeypatch, folder):
    def refuse(*arguments, **options):
        raise PermissionError(13, "Permission denied", "/data/secret")

    monkeypatch.setattr(xds, "open_checkpoint", refuse, raising=False)
    code, _, err = call(capfd, "load", folder / "model.safetensors")
    assert (code, err) == (1, "xds: error: /data/secret: Permission denied\n")


def test_an_interrupt_is_exit_code_130(capfd, monkeypatch, folder):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(xds, "open_checkpoint", interrupt, raising=False)
    code, _, err = call(capfd, "load", folder / "model.safetensors")
    assert code == 130
    assert "Traceback" not in err


def test_ctrl_c_in_a_real_process(tmp_path):
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    process = subprocess.Popen([*XDS, "cat", str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout.read(1) == b"\0"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert b"Traceback" not in err


def test_errors_without_text_are_named():
    assert errors.describe(MemoryError()) == "MemoryError"
    assert errors.describe(KeyError("x")) == "KeyError: 'x'"
    assert errors.describe(ValueError("bad")) == "bad"
    assert errors.describe(xds.errors.XdsError("all said", filename="/f")) == "all said"


def test_progress_is_drawn_on_a_terminal_only(folder):
    done = run("load", folder / "model.safetensors", "--device", "cpu")
    assert done.stderr == b""
    master, slave = pty.openpty()
    code = (
        "from xds.cli.targets import progress\n"
        "with progress('loading') as update:\n"
        "    update(50, 100); update(100, 100)\n"
    )
    process = subprocess.Popen([sys.executable, "-P", "-c", code], stderr=slave, env={**os.environ, "TERM": "xterm"})
    os.close(slave)
    drawn = b""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            piece = os.read(master, 65536)
        except OSError:
            break
        if not piece:
            break
        drawn += piece
    os.close(master)
    assert process.wait(60) == 0
    assert b"loading" in drawn


def test_doctor(capfd):
    code, out, _ = call(capfd, "doctor")
    assert code == 0
    for name in ("Python", "native core", "GPU", "io_uring", "locked memory", "RDMA devices"):
        assert name in out
    code, out, _ = call(capfd, "doctor", "--json")
    findings = json.loads(out)
    assert code == 0
    assert {"name", "state", "what", "cost", "action", "required"} == set(findings[0])


def test_doctor_fails_without_what_is_required(capfd, monkeypatch):
    from xds import doctor

    broken = doctor.Finding("native core", "absent", "missing", "nothing can be read", "build it", required=True)
    monkeypatch.setattr(doctor, "examine", lambda: [broken])
    code, out, _ = call(capfd, "doctor")
    assert code == 1
    assert "build it" in out


class Entry:
    """An entry point of another distribution."""

    dist = None

    def __init__(self, name, value):
        self.name, self.value = name, value

    def load(self):
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


def test_other_distributions_add_commands_and_broken_ones_hinder_nobody(capfd, monkeypatch, folder):
    group = typer.Typer()

    @group.command()
    def discover() -> None:
        typer.echo("found")

    @group.command()
    def other() -> None:
        typer.echo("other")

    real = list(importlib.metadata.entry_points(group=cli.GROUP))
    added = [Entry("nvme", group), Entry("bad", RuntimeError("no such library"))]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: real + added)
    assert call(capfd, "nvme", "discover")[:2] == (0, "found\n")
    assert call(capfd, "ls", folder)[0] == 0
    code, _, err = call(capfd, "bad")
    assert code == 1
    assert "no such library" in err


def test_sizes_for_people():
    texts = [targets.human(n) for n in (0, 999, 1000, 90_900_000, 8 << 30, 5 * 10**15)]
    assert texts == ["0 B", "999 B", "1.0 kB", "90.9 MB", "8.6 GB", "5000.0 TB"]


def test_shares_of_several_ways():
    assert load_command._shares({"pread": 3, "mapped": 1}) == "pread 75 %, mapped 25 %"
    assert load_command._shares({"copy": 5}) == "copy"
    assert load_command._shares({}) == "-"


def test_plain_paths_become_urls(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert targets.to_url("m.safetensors") == f"xds://{tmp_path}/m.safetensors"
    assert targets.to_url("xds:///m") == "xds:///m"
