"""Indexes, folders, links: which files make up a checkpoint."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile

import pytest
from checkpoint_files import write, write_index

from xds.checkpoint import load, open_checkpoint
from xds.errors import CheckpointError, TruncatedError, UrlError


def u8(*data: int) -> tuple[str, tuple[int, ...], bytes]:
    return "U8", (len(data),), bytes(data)


@pytest.fixture
def sharded(tmp_path):
    """Two shards and the standard index."""
    write(tmp_path / "m-1.safetensors", {"a": u8(1, 2), "b": u8(3)}, metadata={"format": "pt", "x": "first"})
    write(tmp_path / "m-2.safetensors", {"c": u8(4)}, metadata={"x": "second", "y": "2"})
    write_index(tmp_path, {"a": "m-1.safetensors", "b": "m-1.safetensors", "c": "m-2.safetensors"})
    return tmp_path


def contents(loaded):
    return {name: array.tolist() for name, array in loaded.items()}


ALL = {"a": [1, 2], "b": [3], "c": [4]}


@pytest.mark.parametrize("what", ["", "model.safetensors.index.json"])
def test_a_folder_and_its_index(sharded, what):
    loaded = load(sharded / what, device="cpu")
    assert contents(loaded) == ALL
    assert loaded.metadata == {"format": "pt", "x": "first", "y": "2"}


@pytest.mark.parametrize("prefix", ["", "file://", "file://localhost", "xds://", "xds://localhost", "local://"])
def test_urls_of_local_files(sharded, prefix):
    assert contents(load(f"{prefix}{sharded}", device="cpu")) == ALL


def test_a_relative_path(sharded, monkeypatch):
    monkeypatch.chdir(sharded)
    assert contents(load("m-2.safetensors", device="cpu")) == {"c": [4]}


def test_signs_in_a_path_mean_themselves(tmp_path):
    folder = tmp_path / "100%25 a&b #1?"
    folder.mkdir()
    write(folder / "m.safetensors", {"a": u8(1)})
    for url in (folder / "m.safetensors", f"xds://{folder}/m.safetensors", f"file://{folder}/m.safetensors"):
        assert contents(load(url, device="cpu")) == {"a": [1]}


def test_the_only_index_is_taken(sharded):
    (sharded / "model.safetensors.index.json").rename(sharded / "other.index.json")
    assert contents(load(sharded, device="cpu")) == ALL


def test_an_index_of_bin_files_does_not_count(sharded):
    (sharded / "model.safetensors.index.json").unlink()
    write_index(sharded, {"a": "pytorch_model.bin"}, "pytorch_model.bin.index.json")
    assert contents(load(sharded, device="cpu")) == ALL


def test_without_an_index_all_files_are_taken(sharded):
    (sharded / "model.safetensors.index.json").unlink()
    (sharded / "notes.txt").write_text("no tensors here")
    (sharded / "folder.safetensors").mkdir()
    assert contents(load(sharded, device="cpu")) == ALL


def test_the_standard_index_comes_first(sharded):
    write_index(sharded, {"c": "m-2.safetensors"}, "z.index.json")
    assert contents(load(sharded, device="cpu")) == ALL


def test_several_indexes_are_listed(sharded):
    (sharded / "model.safetensors.index.json").rename(sharded / "a.index.json")
    write_index(sharded, {"c": "m-2.safetensors"}, "b.index.json")
    with pytest.raises(CheckpointError, match=r"a\.index\.json, b\.index\.json"):
        load(sharded, device="cpu")


def test_an_empty_folder(tmp_path):
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        load(tmp_path, device="cpu")


def test_nothing_there(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        load(tmp_path / "none.safetensors", device="cpu")
    assert caught.value.filename == str(tmp_path / "none.safetensors")


def test_another_file_system():
    with pytest.raises(UrlError, match="xds:///path"):
        load("memory://a.safetensors", device="cpu")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://example.com/a.safetensors", "https:// cannot read into arrays"),
        ("s3://bucket/a.safetensors", "xds:///path"),
        ("xsd:///data/a.safetensors", "did you mean xds:///data/a.safetensors"),
        ("xds:/data/a.safetensors", "did you mean xds:///data/a.safetensors"),
    ],
)
def test_the_protocol_is_looked_at_before_anything_of_it_is_imported(monkeypatch, url, words):
    monkeypatch.setattr("fsspec.url_to_fs", None)
    with pytest.raises(UrlError, match=words):
        load(url, device="cpu")


def test_the_folder_of_a_repository_in_a_cache(tmp_path):
    old, new = (tmp_path / "snapshots" / name for name in ("old", "new"))
    for folder in (old, new):
        folder.mkdir(parents=True)
    os.utime(old, (1, 1))
    with pytest.raises(CheckpointError, match=re.escape(f"did you mean {new}?")):
        load(tmp_path, device="cpu")
    old.rmdir()
    new.rmdir()
    with pytest.raises(CheckpointError, match=r"in this folder$"):
        load(tmp_path, device="cpu")


def test_a_shard_that_is_missing(sharded):
    (sharded / "m-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"'c'.*m-2\.safetensors.*there is no.*1 of its 2 files are missing"):
        load(sharded, device="cpu")


def test_a_tensor_that_its_shard_lacks(sharded):
    write_index(
        sharded, {"a": "m-1.safetensors", "b": "m-1.safetensors", "c": "m-2.safetensors", "d": "m-2.safetensors"}
    )
    with pytest.raises(CheckpointError, match=r"m-2\.safetensors.*'d' is here, and it is not"):
        load(sharded, device="cpu")


def test_a_tensor_that_the_index_lacks(sharded):
    write_index(sharded, {"a": "m-1.safetensors", "c": "m-2.safetensors"})
    with pytest.raises(CheckpointError, match=r"m-1\.safetensors.*'b' is not in .*strict=False"):
        load(sharded, device="cpu")
    assert contents(load(sharded, device="cpu", strict=False)) == ALL


def test_not_strict_takes_the_shard_that_the_index_names(sharded):
    write(sharded / "m-2.safetensors", {"c": u8(4), "a": u8(9)})
    with pytest.raises(CheckpointError, match="'a' is not in"):
        load(sharded, device="cpu")
    assert contents(load(sharded, device="cpu", strict=False)) == ALL


def test_a_tensor_in_two_shards(sharded):
    (sharded / "model.safetensors.index.json").unlink()
    write(sharded / "m-2.safetensors", {"c": u8(4), "a": u8(9)})
    with pytest.raises(CheckpointError, match=r"m-2\.safetensors.*'a'.*m-1\.safetensors"):
        load(sharded, device="cpu")


def test_a_shard_that_is_truncated(sharded):
    path = sharded / "m-2.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(TruncatedError, match=rf"m-2\.safetensors.*expected {len(whole)} bytes, has {len(whole) - 1}"):
        load(sharded, device="cpu")


@pytest.mark.parametrize(
    "shard", ["/etc/passwd.safetensors", "../m.safetensors", "x/../../m.safetensors", "", ".", "a\0.safetensors"]
)
def test_a_shard_outside_the_folder(sharded, shard):
    write_index(sharded, {"a": shard})
    with pytest.raises(CheckpointError, match=r"'a'.*a file beside the index"):
        load(sharded, device="cpu")


def test_a_shard_of_another_format(sharded):
    write_index(sharded, {"a": "pytorch_model.bin"})
    with pytest.raises(CheckpointError, match=r"'pytorch_model\.bin', which is no safetensors file"):
        load(sharded, device="cpu")


def test_a_shard_in_a_folder_below(tmp_path):
    (tmp_path / "part").mkdir()
    write(tmp_path / "part" / "m.safetensors", {"a": u8(1)})
    write_index(tmp_path, {"a": "part/m.safetensors"})
    assert contents(load(tmp_path, device="cpu")) == {"a": [1]}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[" * 200_000, "not valid JSON"),
        (b'{"a":' * 200_000, "not valid JSON"),
        (
            b'{"metadata": {"total_size": ' + b"1" * 5000 + b'}, "weight_map": {"a": "m-1.safetensors"}}',
            "not valid JSON",
        ),
        (b'\xef\xbb\xbf{"weight_map": {"a": "m-1.safetensors"}}', "not valid JSON"),
        (b'{"weight_map": {"a": "\\ud800.safetensors"}}', r"'a' the file '\\ud800.safetensors'; expected the name"),
        (b'{"weight_map": {"a": "\\udc80.safetensors"}}', "expected the name of a file beside the index"),
        (b'{"weight_map": {"\\ud800": "m-1.safetensors"}}', r"tensor '\\ud800' is here, and it is not"),
        (b'{"weight_map": {"' + b"n" * 100_000 + b'": 1}}', r"nnn\.\.\. \(100002 characters\) the file 1; expected"),
        (b"[]", "'weight_map'"),
        (b"{}", "'weight_map'"),
        (b'{"weight_map": {}}', "'weight_map'"),
        (b'{"weight_map": []}', "'weight_map'"),
        (b'{"weight_map": {"a": 1}}', "'a' the file 1; expected a string"),
        (b'{"weight_map": {"a": null}}', "'a' the file None; expected a string"),
        (b'{"weight_map": {"a": "m-1.safetensors", "a": "m-2.safetensors"}}', "duplicate key 'a'"),
    ],
)
def test_an_index_that_is_not_valid(sharded, text, words):
    (sharded / "model.safetensors.index.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=words) as caught:
        load(sharded, device="cpu")
    assert "model.safetensors.index.json" in str(caught.value)


@pytest.mark.parametrize(
    ("shard", "words"),
    [
        ("m-1.safetensors/b.safetensors", "there is no .*m-1.safetensors/b.safetensors .Not a directory"),
        ("n" * 5000 + ".safetensors", r"there is no .*\.\.\. .* .File name too long"),
        ("loop.safetensors", "a link that leads nowhere"),
        ("dangling.safetensors", "a link that leads nowhere"),
        ("loop.safetensors/a.safetensors", "there is no .*loop.safetensors/a.safetensors .Too many levels"),
        ("folder.safetensors", "a folder"),
        ("fifo.safetensors", "no regular file"),
        ("zero.safetensors", "no regular file"),
        ("gone/a.safetensors", "there is no .*gone/a.safetensors"),
    ],
)
def test_a_shard_that_is_no_file(sharded, shard, words):
    (sharded / "loop.safetensors").symlink_to("loop.safetensors")
    (sharded / "dangling.safetensors").symlink_to("nowhere")
    (sharded / "zero.safetensors").symlink_to("/dev/zero")
    (sharded / "folder.safetensors").mkdir()
    os.mkfifo(sharded / "fifo.safetensors")
    index = write_index(sharded, {"a": "m-1.safetensors", "b": shard})
    with pytest.raises(CheckpointError, match=words) as caught:
        load(sharded, device="cpu")
    assert f"{index}: weight_map gives tensor 'b' the file '{shard[:100]}" in str(caught.value)
    assert caught.value.filename == str(index)
    assert len(str(caught.value)) < 2000


@pytest.mark.timeout(60)
def test_a_duplicate_among_many_names(sharded):
    # A name that is looked for among all names before it takes minutes here.
    names = ",".join(f'"t{number}":"m-1.safetensors"' for number in range(100_000))
    (sharded / "model.safetensors.index.json").write_text(f'{{"weight_map":{{{names},"t99999":"m-1.safetensors"}}}}')
    with pytest.raises(CheckpointError, match="duplicate key 't99999'"):
        load(sharded, device="cpu")


@pytest.mark.timeout(60)
def test_an_index_of_many_shards(tmp_path):
    # All of them but the last are one file, so that only the search for names counts.
    shards = {f"t{number}": f"s{number:05}.safetensors" for number in range(20_000)}
    write_index(tmp_path, {**shards, "last": "z.safetensors"})
    first = tmp_path / "s00000.safetensors"
    write(first, {"t0": u8(1)})
    for shard in list(shards.values())[1:]:
        (tmp_path / shard).symlink_to(first.name)
    with pytest.raises(CheckpointError, match=r"'last' the file 'z\.safetensors', and there is no"):
        load(tmp_path, device="cpu")


def test_more_shards_than_files_may_be_open(tmp_path):
    weight_map: dict[str, object] = {}
    for number in range(40):
        write(tmp_path / f"m-{number:03}.safetensors", {f"t{number}": u8(number)})
        weight_map[f"t{number}"] = f"m-{number:03}.safetensors"
    write_index(tmp_path, weight_map)
    code = f"""
import errno, os, resource, xds
xds.open_checkpoint({str(tmp_path)!r}).close()
used = max(map(int, os.listdir("/proc/self/fd")))
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, hard))
before = os.listdir("/proc/self/fd")
try:
    xds.open_checkpoint({str(tmp_path)!r})
except xds.errors.XdsError as error:
    assert error.errno == errno.EMFILE, error
    assert error.filename.endswith(".safetensors"), error.filename
    words = ("model.safetensors.index.json has 40 files", f"this process may open {{used + 20}} in all", "ulimit -n")
    assert all(word in str(error) for word in words), error
    assert os.listdir("/proc/self/fd") == before
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr


def test_the_cache_of_hugging_face(sharded, tmp_path_factory):
    """Snapshot files are links into a folder of blobs, whose names say nothing."""
    cache = tmp_path_factory.mktemp("models--x")
    snapshot = cache / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for number, file in enumerate(sorted(sharded.iterdir())):
        (cache / "blobs" / f"{number:064x}").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/{number:064x}")
    for url in (snapshot, snapshot / "model.safetensors.index.json"):
        assert contents(load(url, device="cpu")) == ALL
    assert contents(load(snapshot / "m-2.safetensors", device="cpu")) == {"c": [4]}
    (snapshot / "model.safetensors.index.json").unlink()
    assert contents(load(snapshot, device="cpu")) == ALL


def test_a_link_that_leads_nowhere(sharded):
    (sharded / "m-2.safetensors").unlink()
    (sharded / "m-2.safetensors").symlink_to("blobs/gone")
    with pytest.raises(CheckpointError, match=r"'c' the file 'm-2\.safetensors', which is a link that leads nowhere"):
        load(sharded, device="cpu")


def test_no_permission(sharded, as_nobody):
    (sharded / "m-2.safetensors").chmod(0)
    for folder in (sharded, *sharded.parents):
        if folder.stat().st_uid == os.geteuid() and folder.is_relative_to(tempfile.gettempdir()):
            folder.chmod(0o755)

    def child():
        with pytest.raises(PermissionError) as error:
            load(sharded, device="cpu")
        assert error.value.filename == str(sharded / "m-2.safetensors")

    assert as_nobody(child) == 0


def test_a_fifo(tmp_path):
    os.mkfifo(tmp_path / "m.safetensors")
    with pytest.raises(OSError, match="FIFO"):
        load(tmp_path / "m.safetensors", device="cpu")


def test_many_shards(tmp_path):
    weight_map: dict[str, object] = {}
    for number in range(100):
        write(tmp_path / f"m-{number:03}.safetensors", {f"t{number}": u8(number)})
        weight_map[f"t{number}"] = f"m-{number:03}.safetensors"
    write_index(tmp_path, weight_map)
    with open_checkpoint(tmp_path) as checkpoint:
        assert len(checkpoint.files) == 100
        assert contents(checkpoint.load(device="cpu")) == {f"t{number}": [number] for number in range(100)}
        assert contents(checkpoint.load(["t7", "t93"], device="cpu")) == {"t7": [7], "t93": [93]}


def test_info_before_any_byte_is_read(sharded):
    with open_checkpoint(sharded) as checkpoint:
        info = checkpoint.info("b")
    assert (info.name, info.dtype, info.shape, info.nbytes) == ("b", "U8", (1,), 1)
    assert info.file == str(sharded / "m-1.safetensors")
    with open(info.file, "rb") as file:
        assert file.read()[info.offset] == 3
    assert json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]["b"] == "m-1.safetensors"


def test_a_filter_over_shards_reads_no_more_than_it_must(sharded):
    loaded = load(sharded, device="cpu", names=lambda name: name in "ac")
    assert contents(loaded) == {"a": [1, 2], "c": [4]}
    assert loaded.report.nbytes == 3
