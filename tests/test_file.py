from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import io
import itertools
import os
import pickle
import threading
import time
import zipfile

import fsspec
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from xds.errors import (
    ArrayError,
    FileChangedError,
    ForkedProcessError,
    RangeError,
    RequirementError,
    ShortReadError,
)
from xds.file import StorageFile
from xds.futures import TransferFuture
from xds.report import ReadReport

CACHES = ["none", "readahead", "bytes", "blockcache", "background", "mmap", "first", "all"]


def test_what_fsspec_expects_of_a_file(fs, data_file, content):
    with fs.open("xds://" + data_file) as file:
        assert isinstance(file, StorageFile)
        assert isinstance(file, io.IOBase)
        assert file.size == len(content)
        assert file.info() == fs.info(data_file) == file.details
        assert file.full_name == "xds://" + data_file
        assert file.path == data_file
        assert file.fs is fs
        assert file.mode == "rb"
        assert file.readable()
        assert file.seekable()
        assert not file.writable()
        assert not file.isatty()
        with pytest.raises(io.UnsupportedOperation, match=r"readinto\(array\)"):
            file.fileno()
        with pytest.raises(io.UnsupportedOperation):
            file.write(b"x")
        with pytest.raises(io.UnsupportedOperation):
            file.truncate()


def test_seek_tell_read(fs, data_file, content):
    with fs.open(data_file) as file:
        assert file.tell() == 0
        assert file.read(10) == content[:10]
        assert file.tell() == 10
        assert file.seek(5, 1) == 15
        assert file.read(5) == content[15:20]
        assert file.seek(-7, 2) == len(content) - 7
        assert file.read() == content[-7:]
        assert file.read() == file.read(5) == b""
        assert file.seek(len(content) + 100) == len(content) + 100
        assert file.read(5) == file.read() == b""
        assert file.readinto(bytearray(5)) == 0
        assert file.tell() == len(content) + 100
        file.seek(0)
        assert file.read(None) == content
        file.seek(0)
        assert file.read(0) == b""
        assert file.read(len(content) * 2) == content
        for bad in (lambda: file.seek(-1), lambda: file.seek(0, 3), lambda: file.seek(-1 - len(content), 2)):
            with pytest.raises(ValueError, match=r"seek|whence"):
                bad()
        with pytest.raises(TypeError):
            file.read(1.5)


def test_after_close_everything_raises(fs, data_file):
    file = fs.open(data_file)
    assert not file.closed
    file.close()
    file.close()
    assert file.closed
    assert not file.readable()
    for call in (
        file.read,
        file.tell,
        file.readline,
        file.read1,
        lambda: file.seek(0),
        lambda: file.readinto(bytearray(1)),
        lambda: file.pread(bytearray(1)),
        lambda: next(file),
        lambda: pickle.dumps(file),
        file.__enter__,
    ):
        with pytest.raises(ValueError, match="closed"):
            call()


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # fsspec's mmap cache does not close its own file
@pytest.mark.parametrize("cache_type", CACHES)
def test_each_cache_of_fsspec_gives_the_same_bytes(fs, data_file, content, cache_type):
    with fs.open(data_file, cache_type=cache_type, block_size=8192) as file:
        assert file.cache.name == cache_type or cache_type == "none"
        assert file.blocksize == 8192
        for offset, nbytes in ((0, 10), (5, 10000), (len(content) - 10, 100), (100000, 1), (len(content), 5), (7, 7)):
            file.seek(offset)
            assert file.read(nbytes) == content[offset : offset + nbytes]
            file.seek(offset)
            buffer = np.zeros(nbytes, np.uint8)
            got = file.readinto(buffer)
            assert buffer[:got].tobytes() == content[offset : offset + nbytes]
        file.seek(3)
        assert file.read() == content[3:]


class Exporter:
    """An array that speaks DLPack alone."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **arguments):
        return self.array.__dlpack__(**arguments)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # as above
@pytest.mark.parametrize("cache_type", CACHES)
@pytest.mark.parametrize(
    "dtype", ["u1", ">i4", "M8[ns]", "m8[s]", "U4", "g", "c16", "V5", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, "dl"]
)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 4)])
def test_a_cache_fills_arrays_of_every_type(fs, data_file, content, cache_type, dtype, shape):
    array = np.zeros(shape, np.float32 if dtype == "dl" else dtype)
    with fs.open(data_file, cache_type=cache_type) as file:
        file.seek(11)
        assert file.readinto(Exporter(array) if dtype == "dl" else array) == array.nbytes
        assert array.tobytes() == content[11 : 11 + array.nbytes]
        file.seek(-5, 2)
        room = np.zeros(8, "M8[ns]")
        assert file.readinto(room) == 5
        assert room.tobytes() == content[-5:] + bytes(59)


def test_cache_settings(fs, data_file):
    with fs.open(data_file, cache_type="blockcache", block_size=4096, cache_options={"maxblocks": 3}) as file:
        assert file.cache.maxblocks == 3
        file.read(10)
        assert file.cache.blocksize == 4096
    with fs.open(data_file) as file:
        assert file.cache.name == "none"
    with pytest.raises(ValueError, match="readahead"):
        fs.open(data_file, cache_type="nonsense")
    with pytest.raises(TypeError):
        fs.open(data_file, cache_type="readahead", cache_options={"nonsense": 1})


def test_a_cache_that_cannot_be_made_leaves_nothing_open(fs, data_file):
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TypeError):
        fs.open(data_file, cache_type="readahead", cache_options={"nonsense": 1})
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("cache_type", ["none", "readahead", "blockcache"])
def test_pickle_reopens_with_position_and_cache(fs, data_file, content, cache_type):
    options = {"maxblocks": 3} if cache_type == "blockcache" else {}
    with fs.open(data_file, cache_type=cache_type, block_size=4096, cache_options=options) as file:
        file.seek(100)
        with pickle.loads(pickle.dumps(file)) as other:
            assert other.tell() == 100
            assert other.read(10) == content[100:110]
            assert other.blocksize == 4096
            assert type(other.cache) is type(file.cache)
            assert other.cache_options == options
            if options:
                assert other.cache.maxblocks == 3
            assert other.fs is fs
        assert file.tell() == 100


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
def test_lines_are_those_of_python(tmp_path, fs, data):
    text = data.draw(st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r\n", b"x" * 70000]), max_size=12).map(b"".join))
    path = tmp_path / "lines"
    path.write_bytes(text)
    limits = data.draw(st.lists(st.one_of(st.none(), st.integers(-1, 20)), max_size=6))
    with open(path, "rb") as expected, fs.open(str(path)) as file:
        for limit in limits:
            assert file.readline(limit) == expected.readline(-1 if limit is None else limit)
            assert file.tell() == expected.tell()
        assert list(file) == list(expected)
    with open(path, "rb") as expected, fs.open(str(path), cache_type="readahead") as file:
        assert file.readlines() == expected.readlines()


@pytest.mark.parametrize("block", [1, 2, 3, 1000])
def test_readuntil(fs, tmp_path, block):
    path = tmp_path / "a"
    path.write_bytes(b"one--two-three--four")
    with fs.open(str(path)) as file:
        parts = []
        while part := file.readuntil(b"--", block):
            parts.append(part)
        assert parts == [b"one--", b"two-three--", b"four"]
        file.seek(0)
        assert file.readuntil(b"n") == b"on"
        assert file.tell() == 2


def test_text_and_zip_and_compression(fs, tmp_path):
    (tmp_path / "text").write_text("zwölf\nBoxkämpfer\n", encoding="utf-8")
    with fs.open(str(tmp_path / "text"), "r", encoding="utf-8") as file:
        assert list(file) == ["zwölf\n", "Boxkämpfer\n"]
    assert fs.read_text(str(tmp_path / "text"), encoding="utf-8") == "zwölf\nBoxkämpfer\n"
    with zipfile.ZipFile(tmp_path / "zip", "w") as archive:
        archive.writestr("inner", "inside")
    with fs.open(str(tmp_path / "zip")) as file, zipfile.ZipFile(file) as archive:
        assert archive.read("inner") == b"inside"
    import gzip

    (tmp_path / "a.gz").write_bytes(gzip.compress(b"packed"))
    with fs.open(str(tmp_path / "a.gz"), compression="infer") as file:
        assert file.read() == b"packed"


@pytest.mark.parametrize("nbytes", [1, 4096, (1 << 20) - 1, 1 << 20, 3 << 20])
def test_readinto_fills_arrays_of_any_type(fs, data_file, content, nbytes):
    with fs.open(data_file) as file:
        for array in (bytearray(nbytes), np.zeros(nbytes, np.uint8), (ctypes.c_char * nbytes)()):
            file.seek(17)
            got = file.readinto(array)
            assert got == min(nbytes, len(content) - 17)
            assert bytes(array) == content[17 : 17 + nbytes]
            assert file.tell() == 17 + got
            assert file.report.nbytes == got
            assert file.report.posting == {"host": got}
            assert file.report.placement == {"mapped": got}
        values = np.zeros(nbytes // 8, "<f8")
        file.seek(0)
        assert file.readinto1(values) == values.nbytes
        assert values.tobytes() == content[: values.nbytes]


@pytest.mark.parametrize("nbytes", [100, 2 << 20])
def test_readinto_is_short_only_at_the_end_and_leaves_the_rest_alone(fs, data_file, content, nbytes):
    with fs.open(data_file) as file:
        array = np.full(nbytes + 50, 7, np.uint8)
        file.seek(-nbytes, 2)
        assert file.readinto(array) == nbytes
        assert array[:nbytes].tobytes() == content[-nbytes:]
        assert (array[nbytes:] == 7).all()
        assert file.readinto(array) == 0
        assert (array[nbytes:] == 7).all()


def test_readinto_checks_first(fs, data_file):
    with fs.open(data_file) as file:
        for wrong in (b"read-only", np.zeros((4, 4)).T, None):
            with pytest.raises(ArrayError):
                file.readinto(wrong)
        array = np.full(10, 7, np.uint8)
        with pytest.raises(RequirementError):
            file.readinto(array, require={"posting": "gpu"})
        with pytest.raises(ValueError, match="require="):
            file.readinto(array, require={"post": "gpu"})
        assert file.tell() == 0
        assert (array == 7).all()
        assert file.readinto(array, require={"posting": "host", "placement": "mapped"}) == 10
        assert file.readinto(bytearray()) == 0


def test_small_reads_start_no_thread(fs, data_file):
    import xds

    xds.close()
    before = len(os.listdir("/proc/self/task"))
    with fs.open(data_file) as file:
        file.readinto(bytearray((1 << 20) - 1))
        file.read(1000)
        assert file.pread(bytearray(1000)).get() == 1000
    fs.cat_file(data_file, 0, 1000)
    assert len(os.listdir("/proc/self/task")) <= before


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 1 << 20, 3 << 20])
def test_pread(fs, data_file, content, nbytes):
    with fs.open(data_file) as file:
        array = np.zeros(nbytes, np.uint8)
        future = file.pread(array, offset=5)
        assert isinstance(future, TransferFuture)
        got = future.get()
        assert got == min(nbytes, len(content) - 5) == future.get() == future.result(1) == future.result()
        assert future.done()
        assert array[:got].tobytes() == content[5 : 5 + got]
        assert isinstance(future.report, ReadReport)
        assert file.report is future.report
        assert future.report.nbytes == got
        assert file.tell() == 0


def test_pread_bounds(fs, data_file, content):
    with fs.open(data_file) as file:
        array = np.full(100, 7, np.uint8)
        assert file.pread(array, 10, 20).get() == 10
        assert array[:10].tobytes() == content[20:30]
        assert (array[10:] == 7).all()
        assert file.pread(array, offset=len(content) - 3).get() == 3
        assert file.pread(array, offset=len(content)).get() == 0
        assert file.pread(array, offset=1 << 62).get() == 0
        assert file.pread(array, nbytes=0).get() == 0
        for arguments in ((array, -1), (array, 1, -1)):
            with pytest.raises(RangeError):
                file.pread(*arguments)
        with pytest.raises(ArrayError, match="101 bytes into an array of 100"):
            file.pread(array, 101)
        with pytest.raises(ArrayError):
            file.pread(b"abc")
        with pytest.raises(RequirementError):
            file.pread(array, require={"placement": "dma"})


def test_pread_survives_the_close_of_its_file_and_many_run_at_once(fs, data_file, content):
    file = fs.open(data_file)
    arrays = [np.zeros(2 << 20, np.uint8) for _ in range(8)]
    futures = [file.pread(array, offset=index * 1000) for index, array in enumerate(arrays)]
    file.close()
    for index, (array, future) in enumerate(zip(arrays, futures, strict=True)):
        assert future.get() == 2 << 20
        assert array.tobytes() == content[index * 1000 : index * 1000 + (2 << 20)]


def test_pread_is_waited_for_by_many_threads(fs, data_file):
    with fs.open(data_file) as file:
        future = file.pread(np.zeros(2 << 20, np.uint8))
        results: list[int] = []
        threads = [threading.Thread(target=lambda: results.append(future.get())) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [2 << 20] * 8


def test_a_dropped_pread_leaves_nothing_behind(fs, data_file):
    with fs.open(data_file) as file:
        for _ in range(20):
            file.pread(np.zeros(2 << 20, np.uint8))
        gc.collect()
        array = np.zeros(2 << 20, np.uint8)
        assert file.pread(array).get() == 2 << 20


class SlowTransfer:
    """A transfer that ends when it is told to."""

    def __init__(self, error=None):
        self.ended, self.cancelled, self.error = threading.Event(), 0, error

    def add(self, segments, *, stream=None, keepalive=None):
        return 0

    def seal(self):
        pass

    def done(self):
        return self.ended.is_set()

    def wait(self):
        self.ended.wait()
        if self.error is not None:
            raise self.error
        return ReadReport(2 << 20)

    def cancel(self):
        self.cancelled += 1


@pytest.fixture
def slow(fs, data_file):
    """A file whose transfers are ``SlowTransfer`` (the one it gives)."""
    file = fs.open(data_file)
    transfer = SlowTransfer()

    class Backend:
        def transfer(self, handles, **arguments):
            return transfer

    file._backend = Backend()
    with file:
        yield file, transfer


def test_result_times_out_and_the_read_goes_on(slow):
    file, transfer = slow
    future = file.pread(np.zeros(2 << 20, np.uint8))
    assert not future.done()
    with pytest.raises(TimeoutError, match="goes on"):
        future.result(0.01)
    with pytest.raises(TimeoutError):
        future.result(0)
    assert future.report is None
    threading.Timer(0.02, transfer.ended.set).start()
    assert future.result(30) == 2 << 20
    assert transfer.cancelled == 0


def test_a_failure_is_raised_at_each_get(slow):
    file, transfer = slow
    transfer.error = ShortReadError("ended early")
    transfer.ended.set()
    future = file.pread(np.zeros(2 << 20, np.uint8))
    for _ in range(2):
        with pytest.raises(ShortReadError, match="ended early"):
            future.get()
    assert future.done()


def test_an_interrupt_cancels_and_is_remembered(slow):
    file, transfer = slow
    transfer.error = KeyboardInterrupt()
    transfer.ended.set()
    future = file.pread(np.zeros(2 << 20, np.uint8))
    with pytest.raises(KeyboardInterrupt):
        future.get()
    assert transfer.cancelled == 1
    with pytest.raises(RuntimeError, match="interrupted"):
        future.get()


def test_a_dropped_future_cancels_its_read(slow):
    file, transfer = slow
    future = file.pread(np.zeros(2 << 20, np.uint8))
    del future
    gc.collect()
    assert transfer.cancelled == 1


def test_a_future_stays_in_its_process(slow, in_child):
    """Also when another thread waits in it, and so holds its lock, at the time of the fork."""
    file, transfer = slow
    future = file.pread(np.zeros(2 << 20, np.uint8))
    waiter = threading.Thread(target=future.get)
    waiter.start()
    while not future._lock.locked():
        time.sleep(0.001)

    def child():
        for wait in (future.get, future.result, lambda: future.result(0.1), future.done):
            with pytest.raises(ForkedProcessError, match="begun by the parent process"):
                wait()

    assert in_child(child) == 0
    transfer.ended.set()
    waiter.join()
    assert future.get() == 2 << 20

    def finished():
        assert future.done()
        assert future.get() == future.result(0) == 2 << 20

    with future._lock:
        assert in_child(finished) == 0


def test_a_failure_stays_known_after_a_fork(slow, in_child):
    file, transfer = slow
    transfer.error = ShortReadError("ended early")
    transfer.ended.set()
    future = file.pread(np.zeros(2 << 20, np.uint8))
    with pytest.raises(ShortReadError):
        future.get()

    def child():
        with pytest.raises(ShortReadError, match="ended early"):
            future.get()

    assert in_child(child) == 0


def test_a_real_read_stays_in_its_process(fs, data_file, content, in_child):
    with fs.open(data_file) as file:
        array = np.zeros(2 << 20, np.uint8)
        future = file.pread(array)

        def child():
            with pytest.raises(ForkedProcessError):
                future.get()
            assert file.readinto(array) == 2 << 20

        assert in_child(child) == 0
        assert future.get() == 2 << 20
        assert array.tobytes() == content[: 2 << 20]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_future_is_not_copied(slow, copied):
    file, transfer = slow
    future = file.pread(np.zeros(2 << 20, np.uint8))
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copied(future)
    gc.collect()
    assert transfer.cancelled == 0
    transfer.ended.set()
    future.get()


def test_the_array_is_held_until_done(slow):
    file, transfer = slow
    buffer = bytearray(2 << 20)
    future = file.pread(buffer)
    with pytest.raises(BufferError):
        buffer.clear()
    transfer.ended.set()
    future.get()
    buffer.clear()


@pytest.mark.parametrize("nbytes", [1000, 2 << 20])
@pytest.mark.parametrize("change", ["shrink", "grow", "replace", "remove"])
@pytest.mark.parametrize("how", ["read", "readinto", "pread", "readline"])
def test_a_file_that_changes_under_the_reader_is_an_error(fs, data_file, content, nbytes, change, how):
    file = fs.open(data_file)
    if change == "shrink":
        os.truncate(data_file, 500)
    elif change == "grow":
        with open(data_file, "ab") as writer:
            writer.write(b"more")
    elif change == "replace":
        with open(data_file + "2", "wb") as writer:
            writer.write(content)
        os.rename(data_file + "2", data_file)  # noqa: PTH104 (what people do)
    else:
        os.remove(data_file)  # noqa: PTH107
    reads = {
        "read": lambda: file.read(nbytes),
        "readinto": lambda: file.readinto(bytearray(nbytes)),
        "pread": lambda: file.pread(bytearray(nbytes)).get(),
        "readline": file.readline,
    }
    with pytest.raises(FileChangedError) as caught:
        reads[how]()
    assert data_file in str(caught.value)
    assert str(len(content)) in str(caught.value)
    file.close()


def test_a_file_that_is_shorter_than_it_says(fs):
    # Files of sysfs say 4096 bytes and hold a few: no other bytes may be made up for the rest.
    path = "/sys/kernel/mm/transparent_hugepage/enabled"
    if not os.path.exists(path) or fs.size(path) != 4096:
        pytest.skip(f"{path} is not there, or is as long as it says")
    with fs.open(path) as file, pytest.raises(ShortReadError, match=r"said to be 4096.*read them with open\(\)"):
        file.read()
    with pytest.raises(ShortReadError):
        fs.cat_file(path)


def test_open_file_through_fsspec(data_file, content):
    with fsspec.open("xds://" + data_file) as file:
        assert file.read(5) == content[:5]
    files = fsspec.open_files("xds://" + os.path.dirname(data_file) + "/*.bin")
    assert [file.full_name for file in files] == ["xds://" + data_file]
    with pickle.loads(pickle.dumps(files[0])) as file:
        assert file.read(5) == content[:5]


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # as above
@pytest.mark.parametrize("protocol", ["simplecache", "filecache", "blockcache"])
def test_chained_caches_of_fsspec(tmp_path, data_file, content, protocol):
    options = {protocol: {"cache_storage": str(tmp_path / "cache")}}
    with fsspec.open(f"{protocol}::xds://{data_file}", **options) as file:
        file.seek(1000)
        assert file.read(100) == content[1000:1100]
        file.seek(0)
        assert file.readline() == content[: content.index(b"\n") + 1]


def test_torch_load(fs, tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    path = tmp_path / "a.pt"
    tensor = torch.arange(300_000, dtype=torch.float32)
    torch.save({"a": tensor}, path)
    with fs.open(str(path)) as file:
        assert torch.equal(torch.load(file, weights_only=True)["a"], tensor)
    target = torch.zeros(1000)
    with fs.open(str(path)) as file, contextlib.closing(io.BytesIO(path.read_bytes())) as expected:
        assert file.readinto(target) == 4000
        assert target.numpy().tobytes() == expected.read(4000)


def test_reads_of_one_handle_by_many_threads(fs, data_file, content):
    with fs.open(data_file) as file:
        failures: list[object] = []
        offsets = itertools.cycle(range(0, 1 << 20, 4099))
        lock = threading.Lock()

        def reader():
            try:
                for _ in range(50):
                    with lock:
                        offset = next(offsets)
                    array = np.zeros(5000, np.uint8)
                    if file.pread(array, offset=offset).get() != 5000:
                        failures.append("short")
                    if array.tobytes() != content[offset : offset + 5000]:
                        failures.append(offset)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=reader) for _ in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []


def test_closing_under_readers_ends_them_cleanly(fs, data_file):
    for _ in range(10):
        file = fs.open(data_file)
        errors: list[BaseException] = []

        def reader(file=file, errors=errors):
            try:
                while True:
                    file.pread(bytearray(1000)).get()
            except BaseException as error:
                errors.append(error)  # noqa: B023 (the name of this except clause)

        threads = [threading.Thread(target=reader) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.002)
        file.close()
        for thread in threads:
            thread.join()
        assert [type(error) for error in errors] == [ValueError] * 4
