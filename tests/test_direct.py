from __future__ import annotations

import contextlib
import copy
import errno
import fcntl
import gc
import os
import pickle
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from xds.direct.backend import DirectBackend, check_require
from xds.errors import FileChangedError, RequirementError, XdsError
from xds.plan import segments


@pytest.fixture
def backend():
    return DirectBackend()


def read(handle, offset, nbytes):
    buffer = bytearray(nbytes)
    return bytes(buffer[: handle.pread_into(memoryview(buffer), offset)])


def test_info_is_what_stat_says(backend, data_file, content):
    info, status = backend.info(data_file), Path(data_file).stat()
    assert info["name"] == data_file
    assert info["type"] == "file"
    assert info["size"] == len(content)
    assert info["mtime"] == status.st_mtime
    assert info["created"] == status.st_ctime
    assert isinstance(info["mtime"], float)
    for key in ("mode", "ino", "nlink", "uid", "gid"):
        assert info[key] == getattr(status, f"st_{key}")
    assert info["islink"] is False
    assert "destination" not in info
    with contextlib.closing(backend.open(data_file)) as handle:
        assert handle.identity == info["identity"]
        assert handle.nbytes == len(content)


@pytest.mark.parametrize("path", ["/proc/cpuinfo", "/proc/self/status"])
def test_a_file_of_proc_is_refused_and_not_taken_for_empty(backend, path):
    assert Path(path).stat().st_size == 0
    with pytest.raises(XdsError, match=r"not known to the file system.*read it with open\(\)") as caught:
        backend.open(path)
    assert (caught.value.errno, caught.value.filename) == (errno.EINVAL, path)


def test_an_empty_file_is_one(backend, tmp_path):
    (tmp_path / "empty").touch()
    with contextlib.closing(backend.open(str(tmp_path / "empty"))) as handle:
        assert handle.nbytes == 0


def test_links_are_followed(backend, tmp_path, data_file, content):
    (tmp_path / "link").symlink_to("data.bin")
    (tmp_path / "folder").mkdir()
    (tmp_path / "to-folder").symlink_to("folder")
    info = backend.info(str(tmp_path / "link"))
    assert (info["type"], info["size"], info["islink"], info["destination"]) == ("file", len(content), True, "data.bin")
    assert backend.info(str(tmp_path / "to-folder"))["type"] == "directory"
    handle = backend.open(str(tmp_path / "link"))
    assert read(handle, 0, 10) == content[:10]
    (tmp_path / "other").write_bytes(content)
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to("other")
    with pytest.raises(FileChangedError, match="another file"):
        handle.check_unchanged()
    handle.close()


def test_ls_sorts_and_survives_what_cannot_be_followed(backend, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    names = ["b", "a", "ä", "A", " ", "a b", "100%", "#", "?", "[x]", "new\nline", "\udcff\udcfe"]
    for name in names:
        Path(os.fsencode(str(folder)).decode(), name).write_bytes(b"x")
    (folder / "dangling").symlink_to("nowhere")
    (folder / "circle").symlink_to("circle")
    (folder / "through-a-file").symlink_to("a/b")
    os.mkfifo(folder / "fifo")
    (folder / "sub").mkdir()
    entries = backend.ls(str(folder))
    found = [entry["name"][len(str(folder)) + 1 :] for entry in entries]
    assert found == sorted([*names, "dangling", "circle", "through-a-file", "fifo", "sub"])
    types = {entry["name"].rpartition("/")[2]: entry["type"] for entry in entries}
    assert {types[name] for name in names} == {"file"}
    assert types["dangling"] == types["circle"] == types["through-a-file"] == "link"
    assert types["fifo"] == "other"
    assert types["sub"] == "directory"
    for entry in entries:
        assert backend.info(entry["name"]) == entry


def test_ls_of_a_file_is_its_entry_and_of_nothing_an_error(backend, data_file, tmp_path):
    assert backend.ls(data_file) == [backend.info(data_file)]
    for missing in (str(tmp_path / "no"), data_file + "/below"):
        with pytest.raises((FileNotFoundError, NotADirectoryError)):
            backend.ls(missing)
        with pytest.raises((FileNotFoundError, NotADirectoryError)):
            backend.info(missing)


def test_a_folder_is_refused(backend, tmp_path):
    with pytest.raises(IsADirectoryError) as caught:
        backend.open(str(tmp_path))
    assert caught.value.errno == errno.EISDIR
    assert caught.value.filename == str(tmp_path)


def test_a_fifo_is_refused_at_once(backend, tmp_path):
    path = str(tmp_path / "fifo")
    os.mkfifo(path)
    assert backend.info(path)["type"] == "other"
    with pytest.raises(XdsError, match="FIFO"):
        backend.open(path)


def test_sockets_and_character_devices_are_refused(backend, tmp_path):
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        with pytest.raises(XdsError, match="socket"):
            backend.open(path)
    assert backend.info("/dev/zero")["type"] == "other"
    with pytest.raises(XdsError, match="character device"):
        backend.open("/dev/zero")


def test_no_permission(backend, tmp_path, as_nobody):
    path = tmp_path / "secret"
    path.write_bytes(b"x")
    path.chmod(0o600)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == 0 and str(folder).startswith("/tmp/"):
            folder.chmod(0o755)

    def check():
        assert backend.info(str(path))["size"] == 1
        with pytest.raises(PermissionError) as caught:
            backend.open(str(path))
        assert caught.value.filename == str(path)

    assert as_nobody(check) == 0


def test_reads_at_offsets_and_over_the_end(backend, data_file, content):
    handle = backend.open(data_file)
    assert read(handle, 0, 0) == b""
    assert read(handle, 12345, 100) == content[12345:12445]
    assert read(handle, len(content) - 5, 100) == content[-5:]
    assert read(handle, len(content), 10) == read(handle, 1 << 60, 10) == b""
    handle.close()


def test_an_empty_file(backend, tmp_path):
    path = tmp_path / "empty"
    path.touch()
    handle = backend.open(str(path))
    assert handle.nbytes == 0
    assert read(handle, 0, 10) == b""
    handle.check_unchanged()
    handle.close()


def test_the_end_of_a_sparse_file_of_5_gib(backend, tmp_path):
    path, size = tmp_path / "sparse", 5 << 30
    with open(path, "wb") as file:
        file.truncate(size)
        file.seek(size - 4)
        file.write(b"tail")
        file.seek((1 << 32) - 2)
        file.write(b"over")
    handle = backend.open(str(path))
    assert handle.nbytes == size
    assert read(handle, size - 6, 100) == b"\0\0tail"
    assert read(handle, (1 << 32) - 4, 8) == b"\0\0over\0\0"
    target = np.full(8, 255, np.uint8)
    batch = segments(1)
    batch[0] = (size - 8, 8, target.ctypes.data, 0, 0)
    with backend.transfer([handle]) as transfer:
        transfer.add(batch, keepalive=target)
        assert transfer.wait().nbytes == 8
    assert target.tobytes() == b"\0\0\0\0tail"
    handle.close()


def test_a_memfd_through_proc(backend, content):
    number = os.memfd_create("data")
    try:
        os.write(number, content)
        path = f"/proc/self/fd/{number}"
        handle = backend.open(path)
        assert handle.nbytes == len(content) == backend.info(path)["size"]
        assert read(handle, 1000, 10) == content[1000:1010]
        handle.check_unchanged()
        os.ftruncate(number, 10)
        with pytest.raises(FileChangedError):
            handle.check_unchanged()
        handle.close()
    finally:
        os.close(number)


@contextlib.contextmanager
def loop_device(path):
    """A loop device over ``path`` (LOOP_CTL_GET_FREE, LOOP_SET_FD, LOOP_CLR_FD of linux/loop.h)."""
    try:
        control = os.open("/dev/loop-control", os.O_RDWR)
    except OSError as error:
        pytest.skip(f"no loop devices here: {error}")
    try:
        name = f"/dev/loop{fcntl.ioctl(control, 0x4C82)}"
        loop = os.open(name, os.O_RDWR)
    except OSError as error:
        pytest.skip(f"no free loop device: {error}")
    finally:
        os.close(control)
    backing = os.open(path, os.O_RDWR)
    try:
        try:
            fcntl.ioctl(loop, 0x4C00, backing)
        except OSError as error:
            pytest.skip(f"{name} cannot be set up: {error}")
        try:
            yield name
        finally:
            fcntl.ioctl(loop, 0x4C01)
    finally:
        os.close(backing)
        os.close(loop)


def test_a_block_device(backend, tmp_path, content):
    path = tmp_path / "disk"
    path.write_bytes(content[: 1 << 20])
    with loop_device(path) as name:
        info = backend.info(name)
        assert (info["type"], info["size"]) == ("file", 1 << 20)
        handle = backend.open(name)
        assert handle.nbytes == 1 << 20
        assert read(handle, 4097, 100) == content[4097:4197]
        assert read(handle, (1 << 20) - 3, 100) == content[(1 << 20) - 3 : 1 << 20]
        handle.check_unchanged()
        handle.close()
        handle.check_unchanged()


def test_unchanged_is_quiet(backend, data_file):
    handle = backend.open(data_file)
    Path(data_file).read_bytes()  # the access time is no change
    handle.check_unchanged()
    handle.close()
    handle.check_unchanged()


def let_clock_tick(path):
    """Wait until the file system's clock has left the time of the last change: it ticks a few times in 10 ms."""
    other = Path(path + ".clock")
    while True:
        other.touch()
        if other.stat().st_ctime_ns > Path(path).stat().st_ctime_ns:
            break
        time.sleep(0.001)
    other.unlink()


def shrink(path):
    os.truncate(path, 100)


def grow(path):
    with open(path, "ab") as file:
        file.write(b"more")


def overwrite(path):
    with open(path, "r+b") as file:
        file.write(b"other")
    os.utime(path, ns=(0, 12345))


def overwrite_and_put_time_back(path):
    status = Path(path).stat()
    with open(path, "r+b") as file:
        file.write(b"other")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def to_the_end_of_time(path):
    os.utime(path, ns=(0, 1 << 62))


def change_mode(path):
    Path(path).chmod(0o600)


def link(path):
    os.link(path, path + ".link")


def replace(path):
    Path(path + ".new").write_bytes(Path(path).read_bytes())
    Path(path + ".new").replace(path)


def remove(path):
    Path(path).unlink()


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (shrink, "changed to 100 bytes"),
        (grow, "changed to 3158077 bytes"),
        (overwrite, "modified 1970-01-01"),
        (overwrite_and_put_time_back, "time was put back"),
        (to_the_end_of_time, "changed to 3158073 bytes"),
        (change_mode, "chmod"),
        (link, "hard link"),
        (replace, "another file is there now"),
        (remove, "no longer there"),
    ],
)
def test_each_change_is_named(backend, data_file, content, change, words, closed):
    handle = backend.open(data_file)
    let_clock_tick(data_file)
    change(data_file)
    if closed:
        handle.close()
    with pytest.raises(FileChangedError) as caught:
        handle.check_unchanged()
    assert words in str(caught.value)
    assert data_file in str(caught.value)
    assert f"{len(content)} bytes" in str(caught.value)
    assert caught.value.errno == errno.ESTALE
    handle.close()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_holds_a_descriptor_is_not_copied(backend, data_file, content, copied):
    with contextlib.closing(backend.open(data_file)) as handle:
        descriptor = handle.descriptor()
        transfer = backend.transfer((handle,))
        for thing in (handle, descriptor, transfer):
            with pytest.raises(TypeError, match=r"cannot be copied or pickled.*(again|another)"):
                copied(thing)
        transfer.cancel()
        gc.collect()
        os.fstat(descriptor.number)
        assert read(handle, 5, 10) == content[5:15]


def test_close_twice_and_reads_after_it(backend, data_file):
    handle = backend.open(data_file)
    handle.close()
    handle.close()
    with pytest.raises(ValueError, match="closed"):
        handle.pread_into(memoryview(bytearray(1)), 0)
    with pytest.raises(ValueError, match="closed"):
        backend.transfer([handle])


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_close_lets_the_descriptor_go(backend, data_file):
    before = descriptors()
    handles = [backend.open(data_file) for _ in range(10)]
    assert descriptors() == before + 10
    for handle in handles:
        handle.close()
    assert descriptors() == before


def test_a_close_in_the_middle_never_lets_another_file_be_read(backend, tmp_path):
    # Each round closes a handle under eight readers while other files take the freed descriptor numbers.
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_bytes(b"g" * 65536)
    bad.write_bytes(b"b" * 65536)
    wrong: list[bytes] = []

    def reader(handle):
        view = memoryview(bytearray(65536))
        try:
            while True:
                got = handle.pread_into(view, 0)
                if got != 65536 or b"b" in bytes(view):
                    wrong.append(bytes(view[:got]))
        except ValueError:
            return

    for _ in range(20):
        handle = backend.open(str(good))
        threads = [threading.Thread(target=reader, args=(handle,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        time.sleep(0.002)
        handle.close()
        others = [os.open(bad, os.O_RDONLY) for _ in range(20)]
        for thread in threads:
            thread.join()
        for number in others:
            os.close(number)
    assert wrong == []


def test_a_transfer_outlives_its_handles(backend, data_file, content):
    handle = backend.open(data_file)
    target = np.zeros(len(content), np.uint8)
    with backend.transfer([handle]) as transfer:
        handle.close()
        batch = segments(1)
        batch[0] = (0, len(content), target.ctypes.data, 0, 0)
        transfer.add(batch, keepalive=target)
        report = transfer.wait()
    assert report.nbytes == len(content)
    assert target.tobytes() == content


def test_require():
    check_require(None, device=None)
    check_require({}, device=0)
    check_require({"posting": "host", "placement": "mapped"}, device=None)
    check_require({"posting": "host", "placement": "copy"}, device=0)
    check_require({"placement": "dma"}, device=0)  # the mover proves or refuses it, file by file
    for device, require in (
        (None, {"posting": "gpu"}),
        (0, {"posting": "gpu"}),
        (None, {"placement": "copy"}),
        (None, {"placement": "dma"}),
        (0, {"posting": "host", "placement": "mapped"}),
    ):
        with pytest.raises(RequirementError, match="cannot be met"):
            check_require(require, device=device)
    for require in ({"posting": "cpu"}, {"placement": ""}, {"speed": "high"}, {"posting": None}):
        with pytest.raises(ValueError, match="require="):
            check_require(require, device=None)


def test_transfer_checks_require_first(backend, data_file):
    handle = backend.open(data_file)
    with pytest.raises(RequirementError):
        backend.transfer([handle], require={"posting": "gpu"})
    with pytest.raises(ValueError, match="unknown key"):
        backend.transfer([handle], require={"post": "gpu"})
    handle.close()


def test_signals_do_not_shorten_a_read(backend, data_file, content):
    import signal

    handle = backend.open(data_file)
    buffer = bytearray(len(content))
    old = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        for _ in range(20):
            assert handle.pread_into(memoryview(buffer), 0) == len(content)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert bytes(buffer) == content
    handle.close()


def test_the_descriptor_is_blocking_and_not_inherited(backend, data_file):
    handle = backend.open(data_file)
    number = handle.descriptor().number
    assert not fcntl.fcntl(number, fcntl.F_GETFL) & os.O_NONBLOCK
    assert fcntl.fcntl(number, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    handle.close()


def test_ls_of_a_folder_whose_entries_vanish(backend, tmp_path):
    stop = threading.Event()

    def churn():
        while not stop.is_set():
            for index in range(20):
                (tmp_path / f"f{index}").touch()
            for index in range(20):
                (tmp_path / f"f{index}").unlink()

    (tmp_path / "stays").touch()
    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(200):
            assert str(tmp_path / "stays") in [entry["name"] for entry in backend.ls(str(tmp_path))]
    finally:
        stop.set()
        thread.join()
