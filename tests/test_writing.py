"""Writing: what appears when, what fails how, and what is kept."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import gzip
import io
import os
import pickle
import shutil
import stat
import threading
from pathlib import Path

import fsspec
import numpy as np
import pytest
from fsspec.callbacks import Callback

import xds
from xds.direct import names, writer
from xds.errors import ArrayError, RangeError, RequirementError, XdsError
from xds.filesystem import XdsFileSystem
from xds.writer_file import WriterFile, write_mode


@pytest.fixture
def old(tmp_path):
    """A file that is there already."""
    path = tmp_path / "file"
    path.write_bytes(b"old bytes")
    return path


@pytest.fixture(params=["unnamed", "named"])
def kind(request, monkeypatch):
    """Both ways to stage a file: without a name, and where the file system cannot do that."""
    if request.param == "named":
        real = os.open

        def refuse(path, flags, *args, **kwargs):
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, "no files without a name", path)
            return real(path, flags, *args, **kwargs)

        monkeypatch.setattr(writer.os, "open", refuse)
    return request.param


class Boom(Exception):
    """What goes wrong."""


# What appears when.


@pytest.mark.parametrize("mode", ["wb", "w+b"])
def test_a_file_is_replaced_at_the_close_and_not_before(fs, old, kind, mode):
    with fs.open(str(old), mode) as file:
        assert isinstance(file, WriterFile)
        file.write(b"new")
        file.flush()
        assert old.read_bytes() == b"old bytes"
    assert old.read_bytes() == b"new"
    assert os.listdir(old.parent) == ["file"]


def test_a_new_file_has_no_name_before_the_close(fs, tmp_path, kind):
    path = tmp_path / "new"
    for mode in ("wb", "xb"):
        with fs.open(str(path), mode) as file:
            file.write(b"bytes" * 100_000)
            assert not path.exists()
        assert path.read_bytes() == b"bytes" * 100_000
        path.unlink()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("mode", ["wb", "w", "w+b"])
def test_an_exception_in_the_block_leaves_the_old_file(fs, old, kind, mode):
    with pytest.raises(Boom), fs.open(str(old), mode) as file:  # noqa: PT012 (the block is what is tested)
        file.write("half" if mode == "w" else b"half")
        raise Boom
    assert file.closed
    assert old.read_bytes() == b"old bytes"
    assert os.listdir(old.parent) == ["file"]


@pytest.mark.parametrize("compression", ["gzip", "bz2", "xz"])
def test_compression_is_written_to_its_end_and_discarded_whole(fs, old, compression):
    with pytest.raises(Boom), fs.open(str(old), "wb", compression=compression) as file:  # noqa: PT012 (the block is what is tested)
        file.write(b"half")
        raise Boom
    assert old.read_bytes() == b"old bytes"
    with fs.open(str(old), "wt", compression=compression) as file:
        file.write("text\n" * 1000)
    with fs.open(str(old), "rt", compression=compression) as file:
        assert list(file) == ["text\n"] * 1000
    if compression == "gzip":
        assert gzip.decompress(old.read_bytes()) == b"text\n" * 1000
        with fs.open(str(old), compression="infer") as file:
            assert file.read() == old.read_bytes()


def test_an_unknown_codec_leaves_nothing_behind(fs, old):
    with pytest.raises(ValueError, match="nonsense"):
        fs.open(str(old), "wb", compression="nonsense")
    assert old.read_bytes() == b"old bytes"
    assert os.listdir(old.parent) == ["file"]


def test_a_write_that_fails_discards_the_file(fs, old, kind, monkeypatch):
    file = fs.open(str(old), "wb")
    file.write(b"x" * 10)

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writer.os, "pwrite", full)
    with pytest.raises(OSError, match="No space left") as caught:
        file.flush()
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(old)
    monkeypatch.undo()
    # The caller who ignores that must hear of it again, and the old file stays.
    with pytest.raises(OSError, match="earlier"):
        file.write(b"more")
    with pytest.raises(OSError, match="discarded"):
        file.close()
    file.close()
    assert old.read_bytes() == b"old bytes"
    assert os.listdir(old.parent) == ["file"]


def test_a_full_disk_at_the_close(fs, old, kind, monkeypatch):
    file = fs.open(str(old), "wb")
    file.write(b"gathered")
    monkeypatch.setattr(writer.os, "pwrite", lambda *args: (_ for _ in ()).throw(OSError(errno.EDQUOT, "quota")))
    with pytest.raises(OSError, match="quota"):
        file.close()
    assert file.closed
    assert old.read_bytes() == b"old bytes"


def test_short_writes_are_continued(fs, tmp_path, monkeypatch, content):
    real = os.pwrite
    monkeypatch.setattr(writer.os, "pwrite", lambda fd, view, offset: real(fd, view[:1000], offset))
    fs.pipe_file(str(tmp_path / "f"), content[:100_000])
    assert (tmp_path / "f").read_bytes() == content[:100_000]


def test_a_killed_process_leaves_nothing(fs, old):
    # A file without a name is gone with the process that held it.
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        file = fs.open(str(old), "wb")
        file.write(b"half" * 100_000)
        os.write(write, b"x")
        threading.Event().wait(60)
        os._exit(1)
    os.read(read, 1)
    os.kill(child, 9)
    os.waitpid(child, 0)
    os.close(read)
    os.close(write)
    assert old.read_bytes() == b"old bytes"
    assert os.listdir(old.parent) == ["file"]


def test_a_file_that_is_dropped_is_written(fs, tmp_path):
    # json.dump(value, fs.open(path, "w")) is common.
    file = fs.open(str(tmp_path / "f"), "w")
    file.write("text")
    del file
    assert (tmp_path / "f").read_text() == "text"


# Exclusive.


def test_exclusive_is_exclusive_at_the_commit_too(fs, tmp_path, kind):
    path = tmp_path / "new"
    file = fs.open(str(path), "xb")
    file.write(b"mine")
    path.write_bytes(b"of somebody faster")
    with pytest.raises(FileExistsError) as caught:
        file.close()
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"of somebody faster"
    assert os.listdir(tmp_path) == ["new"]


@pytest.mark.parametrize("kind", ["named"], indirect=True)
def test_exclusive_without_hard_links(fs, tmp_path, kind, monkeypatch):
    monkeypatch.setattr(writer.os, "link", lambda *args, **kwargs: (_ for _ in ()).throw(OSError(errno.EPERM, "no")))
    fs.pipe_file(str(tmp_path / "new"), b"mine", mode="create")
    assert (tmp_path / "new").read_bytes() == b"mine"
    file = fs.open(str(tmp_path / "other"), "xb")
    (tmp_path / "other").write_bytes(b"faster")
    with pytest.raises(FileExistsError):
        file.close()
    assert (tmp_path / "other").read_bytes() == b"faster"
    assert sorted(os.listdir(tmp_path)) == ["new", "other"]


def test_only_one_of_many_creates(fs, tmp_path):
    path, won = str(tmp_path / "f"), []

    def work(number):
        try:
            fs.pipe_file(path, b"%d" % number, mode="create")
        except FileExistsError:
            return
        won.append(b"%d" % number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert Path(path).read_bytes() == won[0]


def test_exclusive_of_a_link_that_leads_nowhere(fs, tmp_path):
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(FileExistsError):
        fs.open(str(tmp_path / "link"), "xb")


# What is kept.


def test_permissions_and_owner_are_kept(fs, old, kind):
    old.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(old, 12, 34)
    before = old.stat()
    fs.pipe_file(str(old), b"new")
    after = old.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)


def test_permissions_of_new_files(fs, tmp_path, kind):
    mask = os.umask(0o027)
    try:
        fs.pipe_file(str(tmp_path / "a"), b"")
        fs.pipe_file(str(tmp_path / "b"), b"", permissions=0o600)
        fs.touch(str(tmp_path / "c"))
        with fs.open(str(tmp_path / "d"), "ab", permissions=0o777):
            pass
    finally:
        os.umask(mask)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in "abcd"] == [0o640, 0o600, 0o640, 0o750]


@pytest.mark.parametrize("there", [True, False])
def test_links_are_written_through(fs, tmp_path, kind, there):
    (tmp_path / "folder").mkdir()
    target = tmp_path / "folder" / "target"
    if there:
        target.write_bytes(b"old")
    (tmp_path / "middle").symlink_to("folder/target")
    (tmp_path / "link").symlink_to(tmp_path / "middle")
    fs.pipe_file(str(tmp_path / "link"), b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "middle").is_symlink()
    assert target.read_bytes() == b"new"
    assert os.listdir(tmp_path / "folder") == ["target"]


def test_long_names(fs, tmp_path, kind):
    name = "ü" * 127  # 254 bytes
    fs.pipe_file(str(tmp_path / name), b"new")
    fs.pipe_file(str(tmp_path / name), b"newer")
    fs.mv(str(tmp_path / name), str(tmp_path / ("é" * 127)))
    assert os.listdir(tmp_path) == ["é" * 127]


def test_protected_files_and_folders(tmp_path, as_nobody):
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "open" / "file").write_bytes(b"old")
    (tmp_path / "open" / "file").chmod(0o644)
    (tmp_path / "mine").write_bytes(b"old")
    (tmp_path / "mine").chmod(0o666)

    def check():
        fs = XdsFileSystem()
        # Replacing would work, as the folder is writable; but the file says that it must not change.
        for mode in ("wb", "ab", "r+b"):
            with pytest.raises(PermissionError) as caught:
                fs.open(str(tmp_path / "open" / "file"), mode)
            assert caught.value.filename == str(tmp_path / "open" / "file")
        # A new file cannot be made beside the old one; changes in place can.
        with pytest.raises(PermissionError):
            fs.open(str(tmp_path / "mine"), "wb")
        with fs.open(str(tmp_path / "mine"), "r+b") as file:
            file.write(b"new")

    assert as_nobody(check) == 0
    assert (tmp_path / "open" / "file").read_bytes() == b"old"
    assert (tmp_path / "mine").read_bytes() == b"new"


def test_what_cannot_be_written(fs, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for mode in ("wb", "ab", "r+b"):
        with pytest.raises(XdsError, match="FIFO"):
            fs.open(str(tmp_path / "fifo"), mode)
        with pytest.raises(IsADirectoryError):
            fs.open(str(tmp_path), mode)
        with pytest.raises(FileNotFoundError) as caught:
            fs.open(str(tmp_path / "no" / "file"), mode)
        assert caught.value.filename == str(tmp_path / "no" / "file")
    with pytest.raises(FileNotFoundError):
        fs.open(str(tmp_path / "no"), "r+b")


# In place.


def test_appends_of_two_writers_do_not_meet(fs, old):
    with fs.open(str(old), "ab") as one, fs.open(str(old), "ab") as other:
        assert one.tell() == 9
        one.write(b"1")
        one.flush()
        other.write(b"2")
        other.flush()
        one.write(b"3")
    assert old.read_bytes() == b"old bytes123"


def test_read_and_write(fs, old):
    with fs.open(str(old), "r+b") as file:
        assert file.readable()
        assert file.writable()
        assert file.read(4) == b"old "
        file.write(b"BYTE")
        assert file.tell() == 8
        assert file.read() == b"s"
        file.seek(0)
        assert file.readline() == b"old BYTEs"
        assert file.truncate(3) == 3
        assert file.size == 3
        file.seek(0)
        buffer = bytearray(10)
        assert file.readinto(buffer) == 3
        assert bytes(buffer[:3]) == b"old"
    assert old.read_bytes() == b"old"


def test_a_file_for_writing_only_does_not_read(fs, old):
    with fs.open(str(old), "wb") as file:
        assert not file.readable()
        for call in (file.read, file.readline, lambda: file.readinto(bytearray(1)), file.fileno):
            with pytest.raises(io.UnsupportedOperation):
                call()


def test_positions(fs, tmp_path):
    path = str(tmp_path / "f")
    with fs.open(path, "wb") as file:
        assert file.write(np.arange(3, dtype="<u2")) == 6
        assert file.tell() == 6
        assert file.seek(10) == 10
        file.write(b"end")
        assert file.size == 13
        assert file.seek(-3, 2) == 10
        assert file.seek(-8, 1) == 2
        file.write(b"XX")
        with pytest.raises(RangeError):
            file.seek(-1)
        with pytest.raises(ValueError, match="whence"):
            file.seek(0, 3)
        with pytest.raises(TypeError):
            file.write("text")
        with pytest.raises(TypeError):
            file.write(np.arange(10)[::2])
    assert Path(path).read_bytes() == b"\0\0XX\2\0\0\0\0\0end"
    for call in (lambda: file.write(b"x"), file.tell, lambda: file.seek(0), lambda: file.truncate(0), file.flush):
        with pytest.raises(ValueError, match="closed"):
            call()


@pytest.mark.parametrize("block_size", [1, 7, 4096])
def test_any_buffer_gives_the_same_bytes(fs, tmp_path, content, block_size):
    path, offset = str(tmp_path / "f"), 0
    with fs.open(path, "wb", block_size=block_size) as file:
        for nbytes in (1, 0, 5, 6, 7, 8, 4095, 4096, 4097, 10_000):
            assert file.write(content[offset : offset + nbytes]) == nbytes
            offset += nbytes
            assert file.tell() == file.size == offset
    assert Path(path).read_bytes() == content[:offset]


@pytest.mark.parametrize("mode", ["q", "", "rw", "wx", "r", "b", "ww", "+", "w++"])
def test_modes_that_are_none(mode):
    with pytest.raises(ValueError, match="mode"):
        write_mode(mode)


def test_modes_have_one_spelling():
    assert [write_mode(mode) for mode in ("w", "wb", "rb+", "r+b", "bw+", "xb", "a+")] == [
        "wb", "wb", "r+b", "r+b", "w+b", "xb", "a+b",
    ]  # fmt: skip


def test_files_open_for_writing_are_not_pickled(fs, old):
    for mode in ("wb", "ab", "r+b"):
        with fs.open(str(old), mode) as file, pytest.raises(ValueError, match="pickled"):
            pickle.dumps(file)


# fsync.


@pytest.mark.parametrize(("level", "calls"), [("none", []), ("data", ["data"]), ("full", ["file", "folder"])])
@pytest.mark.parametrize("mode", ["wb", "xb", "ab"])
def test_fsync(tmp_path, monkeypatch, level, calls, mode):
    seen = []
    monkeypatch.setattr(writer.os, "fdatasync", lambda fd: seen.append("data"))
    monkeypatch.setattr(
        writer.os, "fsync", lambda fd: seen.append("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file")
    )
    fs = XdsFileSystem(fsync=level)
    with fs.open(str(tmp_path / "f"), mode) as file:
        file.write(b"x")
    assert seen == (calls if mode != "ab" else calls[:1])
    seen.clear()
    with fs.open(str(tmp_path / "f"), "wb", fsync="data") as file:
        file.write(b"x")
    assert seen == ["data"]


# Transactions.


def test_a_transaction_shows_all_at_its_end(fs, old, kind):
    new, appended, local = (old.parent / name for name in ("new", "appended", "local"))
    appended.write_bytes(b"1")
    local.write_bytes(b"put")
    with fs.transaction:
        fs.pipe_file(str(old), b"changed")
        fs.pipe_file(str(new), b"exclusive", mode="create")
        with fs.open(str(appended), "ab") as file:
            assert file.tell() == 1
            file.write(b"23")
        fs.put_file(str(local), str(old.parent / "put"))
        with fs.open(str(old.parent / "text"), "w") as file:
            file.write("text")
        never_closed = fs.open(str(old.parent / "open"), "wb")
        never_closed.write(b"still open")
        assert old.read_bytes() == b"old bytes"
        assert appended.read_bytes() == b"1"
        assert not new.exists()
        assert not (old.parent / "put").exists()
        assert not (old.parent / "text").exists()
    assert old.read_bytes() == b"changed"
    assert new.read_bytes() == b"exclusive"
    assert appended.read_bytes() == b"123"
    assert (old.parent / "put").read_bytes() == b"put"
    assert (old.parent / "text").read_bytes() == b"text"
    assert (old.parent / "open").read_bytes() == b"still open"
    assert sorted(os.listdir(old.parent)) == ["appended", "file", "local", "new", "open", "put", "text"]
    # The next write is no part of it.
    fs.pipe_file(str(old), b"after")
    assert old.read_bytes() == b"after"


def test_a_transaction_that_fails_shows_nothing(fs, old, kind):
    with pytest.raises(Boom), fs.transaction:  # noqa: PT012 (the block is what is tested)
        fs.pipe_file(str(old), b"changed")
        with fs.open(str(old), "ab") as file:
            file.write(b"more")
        fs.pipe_file(str(old.parent / "new"), b"new")
        raise Boom
    assert old.read_bytes() == b"old bytes"
    assert os.listdir(old.parent) == ["file"]
    fs.pipe_file(str(old), b"after")
    assert old.read_bytes() == b"after"


def test_transactions_by_hand(fs, old):
    fs.start_transaction()
    fs.pipe_file(str(old), b"changed")
    assert old.read_bytes() == b"old bytes"
    fs.end_transaction()
    assert old.read_bytes() == b"changed"


def test_a_block_that_fails_within_a_transaction(fs, old):
    with fs.transaction:
        with pytest.raises(Boom), fs.open(str(old), "wb") as file:  # noqa: PT012 (the block is what is tested)
            file.write(b"half")
            raise Boom
        fs.pipe_file(str(old.parent / "new"), b"new")
    assert old.read_bytes() == b"old bytes"
    assert (old.parent / "new").read_bytes() == b"new"


def test_an_append_of_a_transaction_that_fails_is_taken_back(fs, old, monkeypatch):
    real = os.write

    def some(fd, data):
        if os.fstat(fd).st_ino == old.stat().st_ino:
            if os.fstat(fd).st_size > 9:
                raise OSError(errno.ENOSPC, "full")
            return real(fd, data[:2])
        return real(fd, data)

    fs.start_transaction()
    with fs.open(str(old), "ab") as file:
        file.write(b"more")
    monkeypatch.setattr(writer.os, "write", some)
    with pytest.raises(OSError, match="full"):
        fs.end_transaction()
    monkeypatch.undo()
    assert old.read_bytes() == b"old bytes"
    fs.pipe_file(str(old), b"after")
    assert old.read_bytes() == b"after"


def test_autocommit(fs, old, kind):
    file = fs.open(str(old), "wb", autocommit=False)
    file.write(b"new")
    file.close()
    assert old.read_bytes() == b"old bytes"
    file.commit()
    assert old.read_bytes() == b"new"
    file.commit()
    file.discard()
    assert old.read_bytes() == b"new"
    other = fs.open(str(old), "wb", autocommit=False)
    other.write(b"newer")
    other.discard()
    other.commit()
    assert old.read_bytes() == b"new"
    with fs.open(str(old), "wb") as file, pytest.raises(RuntimeError, match="autocommit"):
        file.commit()


# Names.


def test_copy_is_whole_or_nothing(fs, old, tmp_path, monkeypatch):
    target = tmp_path / "target"
    target.write_bytes(b"target")

    def fail(*args):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(names.os, "copy_file_range", fail)
    with pytest.raises(OSError, match="full"):
        fs.cp_file(str(old), str(target))
    assert target.read_bytes() == b"target"
    assert sorted(os.listdir(tmp_path)) == ["file", "target"]


@pytest.mark.parametrize("code", [errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP])
def test_copy_where_the_kernel_cannot(fs, data_file, content, tmp_path, monkeypatch, code):
    monkeypatch.setattr(names.os, "copy_file_range", lambda *args: (_ for _ in ()).throw(OSError(code, "no")))
    fs.cp_file(data_file, str(tmp_path / "copy"))
    assert (tmp_path / "copy").read_bytes() == content


def test_copy_of_a_file_to_itself(fs, old):
    (old.parent / "link").symlink_to("file")
    (old.parent / "hard").hardlink_to(old)
    for other in ("file", "link", "hard"):
        with pytest.raises(shutil.SameFileError):
            fs.cp_file(str(old), str(old.parent / other))
    assert old.read_bytes() == b"old bytes"


def test_copy_of_a_file_that_changes(fs, old, monkeypatch):
    real = names._copy_bytes

    def copy(*args):
        real(*args)
        old.write_bytes(b"meanwhile")

    monkeypatch.setattr(names, "_copy_bytes", copy)
    os.utime(old, (1, 1))
    with pytest.raises(XdsError, match="changed"):
        fs.cp_file(str(old), str(old.parent / "copy"))
    assert os.listdir(old.parent) == ["file"]


@pytest.fixture
def two_file_systems(monkeypatch):
    """Let the kernel say that source and target are on different file systems."""
    real = os.rename

    def rename(old, new):
        if ".xds-" not in os.fspath(old):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), old, None, new)
        real(old, new)

    monkeypatch.setattr(names.os, "rename", rename)


def test_move_between_file_systems(fs, old, tmp_path, two_file_systems):
    old.chmod(0o640)
    (tmp_path / "tree" / "below").mkdir(parents=True)
    (tmp_path / "tree" / "below" / "file").write_bytes(b"1")
    (tmp_path / "tree" / "link").symlink_to("below/file")
    fs.mv(str(old), str(tmp_path / "moved"))
    assert stat.S_IMODE((tmp_path / "moved").stat().st_mode) == 0o640
    fs.mv(str(tmp_path / "tree"), str(tmp_path / "there"))
    assert sorted(os.listdir(tmp_path)) == ["moved", "there"]
    assert (tmp_path / "there" / "link").is_symlink()
    assert (tmp_path / "there" / "below" / "file").read_bytes() == b"1"


def test_a_move_between_file_systems_that_fails(fs, old, tmp_path, two_file_systems, monkeypatch):
    monkeypatch.setattr(names.shutil, "copy2", lambda *args, **kwargs: (_ for _ in ()).throw(OSError(errno.ENOSPC, "")))
    with pytest.raises(OSError):  # noqa: PT011 (ENOSPC)
        fs.mv(str(old), str(tmp_path / "moved"))
    assert os.listdir(tmp_path) == ["file"]


def test_rename_without_replacing(fs, old, tmp_path):
    (tmp_path / "other").write_bytes(b"other")
    with pytest.raises(FileExistsError):
        fs.backend.rename(str(old), str(tmp_path / "other"), replace=False)
    fs.backend.rename(str(old), str(tmp_path / "new"), replace=False)
    assert sorted(os.listdir(tmp_path)) == ["new", "other"]


def test_links_are_removed_and_not_followed(fs, old, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "keep").write_bytes(b"")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "link").symlink_to(tmp_path / "folder")
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    fs.rm(str(tmp_path / "link"), recursive=True)
    fs.rm(str(tmp_path / "tree"), recursive=True)
    assert (tmp_path / "folder" / "keep").exists()
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_the_current_folder_is_not_removed(fs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="current"):
        fs.rm(str(tmp_path), recursive=True)
    assert tmp_path.exists()


def test_the_root_is_neither_made_nor_moved(fs):
    with pytest.raises(FileExistsError):
        fs.mkdir("/")
    fs.makedirs("/", exist_ok=True)
    with pytest.raises(FileExistsError):
        fs.makedirs("/")


# Progress.


class Recorded(Callback):
    """Records what it is told."""

    def __init__(self):
        super().__init__()
        self.sizes, self.steps, self.children = [], [], []

    def set_size(self, size):
        self.sizes.append(size)

    def relative_update(self, inc=1):
        self.steps.append(inc)

    def branched(self, path_1, path_2, **kwargs):
        self.children.append(Recorded())
        return self.children[-1]


def test_callbacks_hear_of_each_piece(fs, tmp_path):
    nbytes = (9 << 20) + 5
    (tmp_path / "big").write_bytes(bytes(nbytes))
    for call, target in ((fs.put_file, "put"), (fs.get_file, "got")):
        callback = Recorded()
        call(str(tmp_path / "big"), str(tmp_path / target), callback=callback)
        assert callback.sizes == [nbytes]
        assert callback.steps == [4 << 20, 4 << 20, (1 << 20) + 5]
        assert (tmp_path / target).stat().st_size == nbytes
    callback = Recorded()
    fs.put([str(tmp_path / "big"), str(tmp_path / "put")], str(tmp_path / "folder") + "/", callback=callback)
    assert callback.sizes == [2]
    assert [child.sizes for child in callback.children] == [[nbytes], [nbytes]]


def test_a_get_that_fails_leaves_no_half_file(fs, data_file, tmp_path, monkeypatch):
    class Stop(Callback):
        def relative_update(self, inc=1):
            raise Boom

    with pytest.raises(Boom):
        fs.get_file(data_file, str(tmp_path / "got"), callback=Stop())
    assert not (tmp_path / "got").exists()
    with pytest.raises(Boom):
        fs.put_file(data_file, str(tmp_path / "put"), callback=Stop())
    assert not (tmp_path / "put").exists()


def test_get_into_a_file_object(fs, data_file, content):
    target = io.BytesIO()
    fs.get_file(data_file, target)
    assert target.getvalue() == content
    fs.get_file(data_file, outfile=(other := io.BytesIO()))
    assert other.getvalue() == content


# From arrays.

ARRAYS = [
    np.arange(1000, dtype="<f4"),
    np.arange(6, dtype=">i8").reshape(2, 3),
    b"bytes",
    bytearray(b"bytes"),
    memoryview(b"0123456789")[2:7],
    np.frombuffer(b"read-only", dtype="u1"),
    np.zeros((0, 4)),
    np.float64(2.5) * np.ones(()),
    (ctypes.c_int32 * 3)(1, 2, 3),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: type(array).__name__)
def test_writefrom_and_pwrite(fs, tmp_path, array):
    path, data = str(tmp_path / "f"), memoryview(array).tobytes()
    with fs.open(path, "wb") as file:
        file.write(b"head")
        assert file.writefrom(array) == len(data)
        assert file.tell() == 4 + len(data)
        file.write(b"tail")
        future = file.pwrite(array, offset=100_000)
        assert future.done()
        assert future.get() == future.result(1) == len(data)
        assert file.tell() == 8 + len(data)
    found = Path(path).read_bytes()
    assert found[: 8 + len(data)] == b"head" + data + b"tail"
    assert found[100_000:] == data
    with fs.open(path, "ab") as file:
        assert file.writefrom(array) == len(data)
        with pytest.raises(io.UnsupportedOperation):
            file.pwrite(array)
    assert Path(path).read_bytes() == found + data


def test_writefrom_through_the_mover(fs, tmp_path, content):
    # What is required takes the same way as arrays of a GPU.
    array = np.frombuffer(content, dtype="u1")
    path = str(tmp_path / "f")
    require = {"placement": "mapped"}
    with fs.open(path, "wb") as file:
        file.write(b"head")
        assert file.writefrom(array, require=require) == len(content)
        assert file.report.operation == "write"
        assert file.report.engine == "mover"
        assert file.report.nbytes == len(content)
        future = file.pwrite(array, 1000, offset=len(content) + 50, require=require)
        file.write(b"tail")
    assert future.get() == 1000
    expected = b"head" + content + b"tail"
    expected += bytes(len(content) + 50 - len(expected)) + content[:1000]
    assert Path(path).read_bytes() == expected
    for mode in ("ab", "r+b"):
        with fs.open(path, mode) as file:
            file.writefrom(array, require=require)
    assert Path(path).read_bytes() == content + expected[len(content) :] + content
    fs.start_transaction()
    with fs.open(path, "ab") as file:
        file.writefrom(array[:100], require=require)
    fs.end_transaction()
    assert Path(path).read_bytes() == content + expected[len(content) :] + content + content[:100]


def test_a_transfer_that_fails_discards_the_file(fs, old, monkeypatch):
    from xds.engine.mover import MoverTransfer

    def fail(self):
        self.cancel()
        raise XdsError("the disk is gone")

    monkeypatch.setattr(MoverTransfer, "wait", fail)
    with fs.open(str(old), "wb") as file:
        future = file.pwrite(np.zeros(10), offset=5, require={"placement": "mapped"})
        with pytest.raises(XdsError, match="gone"):
            future.get()
        with pytest.raises(XdsError, match="gone"):
            future.get()
        with pytest.raises(OSError, match="discarded"):
            file.close()
    assert old.read_bytes() == b"old bytes"


def test_writefrom_refuses_what_it_cannot_write(fs, tmp_path):
    with fs.open(str(tmp_path / "f"), "wb") as file:
        for array in (np.arange(10)[::2], np.array([None]), "text", 5):
            with pytest.raises(ArrayError, match="cannot write from"):
                file.writefrom(array)
        with pytest.raises(ArrayError, match="11 bytes"):
            file.pwrite(b"0123456789", 11)
        with pytest.raises(RangeError):
            file.pwrite(b"0123456789", offset=-1)
        with pytest.raises(RequirementError, match="writes of xds://"):
            file.writefrom(b"x", require={"posting": "gpu"})
        file.write(b"good")
    assert (tmp_path / "f").read_bytes() == b"good"


def test_torch_tensors_are_written(fs, tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    tensor = torch.arange(100, dtype=torch.bfloat16)
    with fs.open(str(tmp_path / "f"), "wb") as file:
        assert file.writefrom(tensor) == 200
    assert (tmp_path / "f").read_bytes() == tensor.view(torch.uint8).numpy().tobytes()
    with fs.open(str(tmp_path / "t"), "wb") as file:
        torch.save({"a": tensor}, file)
    with fs.open(str(tmp_path / "t")) as file:
        assert torch.equal(torch.load(file)["a"], tensor)


def test_jax_arrays_are_written(fs, tmp_path):
    jax = pytest.importorskip("jax", reason="jax is not installed")
    array = jax.numpy.arange(100, dtype="float32")
    with fs.open(str(tmp_path / "f"), "wb") as file:
        assert file.writefrom(array) == 400
    assert (tmp_path / "f").read_bytes() == np.arange(100, dtype="float32").tobytes()


# Told and counted.


def test_writes_are_counted_collected_and_traced(fs, tmp_path):
    before, events = xds.stats(), []
    with xds.collect() as reports, xds.trace(events.append):
        fs.pipe_file(str(tmp_path / "f"), b"12345")
        with fs.open(str(tmp_path / "f"), "ab") as file:
            file.writefrom(np.zeros(10, "u1"), require={"placement": "mapped"})
    after = xds.stats()
    assert (after["writes"] - before["writes"], after["written_nbytes"] - before["written_nbytes"]) == (2, 15)
    assert after["reads"] == before["reads"]
    assert [(report.operation, report.nbytes) for report in reports] == [("write", 5), ("write", 10)]
    assert [(event.name, event.nbytes) for event in events if isinstance(event, xds.Complete)] == [
        ("open", None), ("write", 5), ("open", None), ("write", 10),
    ]  # fmt: skip


# Through fsspec and beside it.


def test_fsspec_open_makes_folders_as_it_does_for_all(tmp_path):
    with fsspec.open(f"xds://{tmp_path}/a/b/file", "wb", auto_mkdir=True) as file:
        file.write(b"x")
    assert (tmp_path / "a" / "b" / "file").read_bytes() == b"x"


def test_writers_in_a_forked_child(fs, tmp_path, in_child):
    fs.pipe_file(str(tmp_path / "parent"), b"1")
    assert in_child(lambda: fs.pipe_file(str(tmp_path / "child"), b"2")) == 0
    assert (tmp_path / "child").read_bytes() == b"2"


def test_many_threads_replace_one_file(fs, old):
    values = [bytes([number]) * 300_000 for number in range(8)]
    stop, wrong = threading.Event(), []

    def read():
        while not stop.is_set():
            data = old.read_bytes()
            if data not in values and data != b"old bytes":
                wrong.append(len(data))

    reader = threading.Thread(target=read)
    reader.start()
    writers = [threading.Thread(target=fs.pipe_file, args=(str(old), value)) for value in values]
    for thread in writers:
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    reader.join()
    assert wrong == []
    assert old.read_bytes() in values
    assert os.listdir(old.parent) == ["file"]


def test_a_cancelled_put_leaves_nothing(tmp_path):
    (tmp_path / "big").write_bytes(bytes(20 << 20))
    reached, go_on = threading.Event(), threading.Event()

    class Slow(Callback):
        def relative_update(self, inc=1):
            reached.set()
            assert go_on.wait(30)

    async def check():
        fs = XdsFileSystem(asynchronous=True)
        task = asyncio.ensure_future(fs._put_file(str(tmp_path / "big"), str(tmp_path / "put"), callback=Slow()))
        await asyncio.to_thread(reached.wait, 30)
        task.cancel()
        await asyncio.sleep(0.01)
        assert not task.done()  # drains first
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(check())
    assert os.listdir(tmp_path) == ["big"]
