"""The mover into host arrays: every method on every kind of storage, residency, reports, settings, threads, forks."""

from __future__ import annotations

import copy
import errno
import gc
import mmap
import os
import pickle
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

import xds
from xds.engine import cpu, mover
from xds.engine.mover import MoverTransfer
from xds.engine.settings import METHODS, RING_LIMIT_NBYTES, settings
from xds.errors import CancelledError, DeviceError, ForkedProcessError, ShortReadError
from xds.plan import SEGMENT, segments
from xds.report import TOTALS, ReadReport

MIB = 1 << 20
CHUNK = 64 << 10
METHODS_HERE = ("pread", "mapped", "buffered", "direct", "uring")
REFUSED = "the file system refused O_DIRECT: read through the page cache"


@pytest.fixture
def sized(monkeypatch):
    """Set the mover's environment variables: the next read makes a mover of that size."""

    def change(**variables):
        mover.close()
        for name, value in variables.items():
            monkeypatch.setenv(f"XDS_MOVER_{name.upper()}", str(value))

    yield change
    mover.close()


def forbid_but(*methods):
    return ",".join(name for name in METHODS if name not in methods)


def batch_of(*rows):
    batch = segments(len(rows))
    batch[:] = list(rows)
    return batch


def read(fd, rows, *, nbytes, path="file", guard=0):
    """Move (offset, nbytes, position) rows into a new array; return it and the report."""
    array = np.full(nbytes + 2 * guard, 0x5A, np.uint8)
    base = array.ctypes.data + guard
    with MoverTransfer([fd], [path]) as transfer:
        batch = batch_of(*((offset, count, base + position, 0, 0) for offset, count, position in rows))
        transfer.add(batch, keepalive=array)
        report = transfer.wait()
    assert report.nbytes == sum(count for _, count, _ in rows)
    assert (
        sum(report.method.values()) == sum(report.placement.values()) == sum(report.posting.values()) == report.nbytes
    )
    assert (array[:guard] == 0x5A).all()
    assert (array[guard + nbytes :] == 0x5A).all()
    return array[guard : guard + nbytes], report


def read_all(fd, nbytes, **options):
    return read(fd, [(0, nbytes, 0)], nbytes=nbytes, **options)


@pytest.fixture
def opened():
    """Open files that close with the test."""
    fds = []

    def open_(path):
        fds.append(os.open(path, os.O_RDONLY))
        return fds[-1]

    yield open_
    for fd in fds:
        os.close(fd)


def is_cold(fd, offset=0):
    try:
        os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
    return False


def cool(fd):
    """Make a file cold, or skip."""
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    if not is_cold(fd):
        pytest.skip("the file system of the temporary folder keeps its pages in memory")


def takes_direct(path):
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return False
    os.close(fd)
    return True


# ---- every method, every storage ------------------------------------------------------------------------------------


def on_disk(tmp_path, data):
    (tmp_path / "file").write_bytes(data)
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    os.fsync(fd)
    return fd


def on_tmpfs(tmp_path, data):
    fd = os.open("/dev/shm", os.O_RDWR | os.O_TMPFILE)
    os.write(fd, data)
    return fd


def in_memfd(tmp_path, data):
    fd = os.memfd_create("xds-test")
    os.write(fd, data)
    return fd


def in_huge_pages(tmp_path, data):
    free = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
    pages = -(-len(data) // (2 * MIB))
    if not free.exists() or int(free.read_text()) < pages:
        pytest.skip(f"needs {pages} free huge pages (vm.nr_hugepages)")
    fd = os.memfd_create("xds-test", os.MFD_CLOEXEC | os.MFD_HUGETLB | os.MFD_HUGE_2MB)
    os.ftruncate(fd, pages * 2 * MIB)
    with mmap.mmap(fd, pages * 2 * MIB) as view:
        view[: len(data)] = data
    return fd


@pytest.mark.parametrize("method", METHODS_HERE)
@pytest.mark.parametrize("storage", [on_disk, on_tmpfs, in_memfd, in_huge_pages])
def test_every_method_on_every_storage(sized, tmp_path, content, storage, method):
    sized(forbid=forbid_but(method), chunk_nbytes=CHUNK, threads=4)
    fd = storage(tmp_path, content)
    try:
        size = len(content)
        got, report = read_all(fd, size, guard=64)
        assert got.tobytes() == content
        if report.method != {method: size}:
            # Only where the storage cannot do it, and then with the reason.
            assert set(report.method) <= {method, "pread", "buffered"}
            assert method in ("mapped", "direct", "uring")
            assert method == "mapped" or REFUSED in report.notes or any("io_uring" in note for note in report.notes)
        if storage is on_disk and (method in ("pread", "mapped", "buffered") or takes_direct(tmp_path / "file")):
            assert method == "uring" or report.method == {method: size}
        assert report.placement == {"mapped": size}
        assert report.posting == {"host": size}
        assert report.commands >= 1
        assert report.threads >= 1
        assert report.device is None
        assert report.engine == "mover"
        assert report.seconds["total"] > 0
    finally:
        os.close(fd)


def test_io_uring_is_used_where_the_kernel_has_it(sized, tmp_path, content):
    sized(forbid=forbid_but("uring"))
    fd = on_disk(tmp_path, content)
    try:
        _, report = read_all(fd, len(content))
    finally:
        os.close(fd)
    if report.notes:
        pytest.skip(f"not here: {report.notes}")
    assert report.method == {"uring": len(content)}


@pytest.mark.parametrize("method", METHODS_HERE)
def test_unaligned_offsets_lengths_and_tails(sized, tmp_path, content, opened, method):
    sized(forbid=forbid_but(method), chunk_nbytes=8192, threads=3)
    on_disk_fd = on_disk(tmp_path, content)
    try:
        size = len(content)
        edges = [0, 1, 511, 4095, 4096, 4097, 8191, 8193, 65537]
        for offset in edges:
            for nbytes in (1, 2, 4095, 4096, 4097, 20000):
                got, _ = read(on_disk_fd, [(offset, nbytes, 0)], nbytes=nbytes, guard=8)
                assert got.tobytes() == content[offset : offset + nbytes]
        for tail in (1, 57, 4096, 4097, 12345, 12346):
            got, _ = read(on_disk_fd, [(size - tail, tail, 0)], nbytes=tail, guard=8)
            assert got.tobytes() == content[-tail:]
    finally:
        os.close(on_disk_fd)


@pytest.mark.parametrize("method", METHODS_HERE)
@pytest.mark.parametrize("seed", range(3))
def test_random_layouts(sized, tmp_path, content, method, seed):
    sized(forbid=forbid_but(method), chunk_nbytes=16384, threads=4)
    pick = random.Random(seed)
    rows, at, offset = [], 0, 0
    for _ in range(400):
        nbytes = pick.choice([0, 1, 7, pick.randrange(5000), pick.randrange(40000)])
        if pick.random() < 0.3:
            offset = pick.randrange(len(content) - nbytes)
        if offset + nbytes > len(content):
            offset = 0
        at += pick.choice([0, 0, 3, 200])
        rows.append((offset, nbytes, at))
        at += nbytes
        offset += nbytes
    expected = bytearray(b"\x5a" * at)
    for offset, nbytes, position in rows:
        expected[position : position + nbytes] = content[offset : offset + nbytes]
    fd = on_disk(tmp_path, content)
    try:
        got, _ = read(fd, rows, nbytes=at, guard=64)
    finally:
        os.close(fd)
    assert got.tobytes() == expected


def test_batches_of_many_files_become_ready_one_by_one(sized, tmp_path, opened):
    sized(chunk_nbytes=CHUNK)
    data = [random.Random(number).randbytes(200_000 + number) for number in range(12)]
    fds = []
    for number, piece in enumerate(data):
        (tmp_path / str(number)).write_bytes(piece)
        fds.append(opened(tmp_path / str(number)))
    arrays = [np.zeros(len(piece), np.uint8) for piece in data]
    with MoverTransfer(fds, [str(number) for number in range(12)]) as transfer:
        for number, array in enumerate(arrays):
            row = (0, array.nbytes, array.ctypes.data, number, 0)
            assert transfer.add(batch_of(row), keepalive=array) == number
        assert transfer.add(segments(0)) == 12  # nothing to move: ready at once
        transfer.seal()
        seen = []
        while (number := transfer.next_ready()) is not None:
            seen.append(number)
            assert number == 12 or arrays[number].tobytes() == data[number]
        assert sorted(seen) == list(range(13))
        assert transfer.next_ready() is None
        assert transfer.wait().nbytes == sum(map(len, data))
        assert transfer.done()


def test_a_sparse_file_of_five_gib(sized, tmp_path, opened):
    sized()
    path = tmp_path / "sparse"
    size = (5 << 30) + 123
    marks = {0: b"begin", (4 << 30) - 3: b"across", size - 3: b"end"}
    with path.open("wb") as file:
        file.truncate(size)
        for offset, mark in marks.items():
            file.seek(offset)
            file.write(mark)
    fd = opened(path)
    for offset, mark in marks.items():
        low = max(0, offset - MIB)
        high = min(size, offset + MIB)
        got, _ = read(fd, [(low, high - low, 0)], nbytes=high - low)
        assert got.tobytes() == bytes(offset - low) + mark + bytes(high - offset - len(mark))


def free_gib():
    """Memory that this process may still take: of the machine, and of its cgroup."""
    free = [int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) << 10]
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and limit.read_text().strip() != "max":
        free.append(int(limit.read_text()) - int(used.read_text()))
    return min(free) >> 30


def test_one_segment_of_more_than_four_gib(sized, tmp_path, opened):
    if free_gib() < 8:
        pytest.skip("needs 8 GiB of free memory")
    sized(forbid="mapped")  # a mapping of a hole in a memory file system would fill it
    path = tmp_path / "sparse"
    size = (4 << 30) + MIB
    marks = {0: b"begin", (4 << 30) - 3: b"across", size - 3: b"end"}
    with path.open("wb") as file:
        file.truncate(size)
        for offset, mark in marks.items():
            file.seek(offset)
            file.write(mark)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    with MoverTransfer([opened(path)], [str(path)]) as transfer:
        transfer.add(batch_of((0, size, array.ctypes.data, 0, 0)), keepalive=array)
        assert transfer.wait().nbytes == size
    for offset, mark in marks.items():
        assert array[offset : offset + len(mark)].tobytes() == mark
    assert sum(np.count_nonzero(array[at : at + MIB]) for at in (0, (4 << 30) - MIB, 4 << 30)) == 14


# ---- residency ------------------------------------------------------------------------------------------------------


def test_a_cold_file_is_seen_as_cold(sized, tmp_path, opened):
    sized()
    data = random.Random(5).randbytes(8 * MIB)
    (tmp_path / "file").write_bytes(data)
    fd = opened(tmp_path / "file")
    cool(fd)
    got, report = read_all(fd, len(data))
    assert got.tobytes() == data
    assert report.resident is not None
    assert report.resident <= 0.25
    assert set(report.method) <= {"direct", "uring", "buffered"}


def test_a_warm_file_is_seen_as_warm(sized, tmp_path, opened):
    sized()
    data = random.Random(6).randbytes(8 * MIB)
    (tmp_path / "file").write_bytes(data)
    fd = opened(tmp_path / "file")
    os.pread(fd, len(data), 0)
    if is_cold(fd):
        pytest.skip("the file system of the temporary folder has no page cache to ask")
    got, report = read_all(fd, len(data))
    assert got.tobytes() == data
    assert report.resident == 1.0
    assert set(report.method) <= {"pread", "mapped"}


def test_the_cold_half_of_a_file_shows(sized, tmp_path, opened):
    sized()
    data = random.Random(7).randbytes(16 * MIB)
    (tmp_path / "file").write_bytes(data)
    fd = opened(tmp_path / "file")
    cool(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    os.pread(fd, 8 * MIB, 0)
    got, report = read_all(fd, len(data))
    assert got.tobytes() == data
    assert report.resident is not None
    assert 0.25 <= report.resident <= 0.75


# ---- what ends badly ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS_HERE)
def test_a_file_cut_short_names_where(sized, tmp_path, opened, method):
    sized(forbid=forbid_but(method), chunk_nbytes=CHUNK, threads=1)
    path = tmp_path / "file"
    path.write_bytes(bytes(MIB))
    fd = opened(path)
    os.truncate(path, 600_001)
    array = np.zeros(MIB, np.uint8)
    errors = xds.stats()["errors"]
    with MoverTransfer([fd], [str(path)]) as transfer:
        transfer.add(batch_of((0, MIB, array.ctypes.data, 0, 0)), keepalive=array)
        with pytest.raises(ShortReadError, match=r"bytes at offset \d+ are missing: the file ends there") as caught:
            transfer.wait()
        assert transfer.done()
        with pytest.raises(CancelledError):
            transfer.wait()
    assert str(path) in str(caught.value)
    assert 600_001 <= int(str(caught.value).split("at offset ")[1].split()[0]) < MIB
    assert caught.value.filename == str(path)
    assert xds.stats()["errors"] == errors + 1


def test_a_closed_descriptor_is_an_error(sized, tmp_path, content):
    sized(forbid=forbid_but("pread"))
    fd = os.memfd_create("xds-test")
    os.close(fd)
    array = np.zeros(100, np.uint8)
    with MoverTransfer([fd], ["gone"]) as transfer:
        transfer.add(batch_of((0, 100, array.ctypes.data, 0, 0)), keepalive=array)
        with pytest.raises(OSError, match="gone: 100 bytes at offset 0") as caught:
            transfer.wait()
    assert caught.value.errno == errno.EBADF


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (batch_of((0, 1, 0, 1, 0)), "name a file or an offset that cannot be"),
        (batch_of((2**63, 1, 0, 0, 0)), "name a file or an offset that cannot be"),
        (batch_of((2**63 - 5, 6, 0, 0, 0)), "name a file or an offset that cannot be"),
        (np.zeros(2, np.uint64), "contiguous vector"),
        (segments(4)[::2], "contiguous vector"),
        (segments(4).reshape(2, 2), "contiguous vector"),
    ],
)
def test_segments_that_cannot_be_are_refused(data_file, opened, batch, words):
    with MoverTransfer([opened(data_file)], [data_file]) as transfer, pytest.raises(ValueError, match=words):
        transfer.add(batch)
    assert SEGMENT.itemsize == 32


def test_what_comes_after_the_end_is_refused(data_file, opened):
    transfer = MoverTransfer([opened(data_file)], [data_file])
    transfer.seal()
    with pytest.raises(CancelledError):
        transfer.add(segments(1))
    assert transfer.wait().nbytes == 0
    assert transfer.wait().nbytes == 0  # the same report again
    assert transfer.landed_nbytes == 0
    transfer.cancel()
    transfer.cancel()
    with pytest.raises(CancelledError, match="over"):
        transfer.add(segments(1))
    transfer.seal()


def test_a_device_that_is_not_there():
    with pytest.raises(DeviceError, match="CUDA device 97 does not exist"):
        MoverTransfer([], [], device=97)


def test_leaving_by_an_exception_stops_the_writes(sized, tmp_path, opened):
    sized(chunk_nbytes=CHUNK, threads=2)
    path = tmp_path / "file"
    path.write_bytes(b"\x01" * (32 * MIB))
    array = np.zeros(32 * MIB, np.uint8)

    def leave():
        with MoverTransfer([opened(path)], [str(path)]) as transfer:
            transfer.add(batch_of((0, array.nbytes, array.ctypes.data, 0, 0)), keepalive=array)
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        leave()
    before = array.copy()
    read_all(opened(path), 4 * MIB)  # the threads have something else to do now
    assert (array == before).all()


def test_a_transfer_that_is_dropped_keeps_its_array_to_the_end(sized, tmp_path, opened):
    sized(chunk_nbytes=CHUNK, threads=2)
    path = tmp_path / "file"
    path.write_bytes(bytes(8 * MIB))
    array = np.ones(8 * MIB, np.uint8)
    gone = weakref.ref(array)
    transfer = MoverTransfer([opened(path)], [str(path)])
    transfer.add(batch_of((0, array.nbytes, array.ctypes.data, 0, 0)), keepalive=array)
    del array
    assert gone() is not None
    transfer.seal()
    del transfer
    gc.collect()
    assert gone() is None


# ---- sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"threads": "none"}, "XDS_MOVER_THREADS='none': expected a whole number from 1 to 64"),
        ({"threads": "0"}, "from 1 to 64"),
        ({"threads": "65"}, "from 1 to 64"),
        ({"cpu_threads": "-1"}, "XDS_MOVER_CPU_THREADS"),
        ({"slots": "1.5"}, "XDS_MOVER_SLOTS"),
        ({"streams": "0"}, "XDS_MOVER_STREAMS"),
        ({"chunk_nbytes": "4095"}, "XDS_MOVER_CHUNK_NBYTES"),
        ({"chunk_nbytes": "5000"}, "expected a multiple of 4096"),
        ({"forbid": "telepathy"}, r"\['telepathy'\] are not among"),
        ({"chunk_nbytes": str(4 * MIB)}, "at most 67108864 are allowed"),
        ({"threads": "64", "slots": "64", "chunk_nbytes": "65536"}, "64 threads x 64 slots x 65536 bytes"),
    ],
)
def test_wrong_settings_are_refused_when_the_mover_is_made(sized, data_file, opened, variables, words):
    sized(**variables)
    with pytest.raises(ValueError, match=words):
        MoverTransfer([opened(data_file)], [data_file])


def test_the_ring_is_never_larger_than_its_limit(sized):
    for threads in (1, 7, 16, 64):
        for slots in (1, 2, 64):
            sized(threads=threads, slots=slots)
            made = settings()
            assert 0 < made.ring_nbytes <= RING_LIMIT_NBYTES
            assert made.chunk_nbytes % 4096 == 0
            assert made.cpu_threads <= made.threads


def test_one_thread_one_slot_one_page(sized, tmp_path, content):
    for method in METHODS_HERE:
        sized(forbid=forbid_but(method), threads=1, cpu_threads=1, slots=1, chunk_nbytes=4096)
        fd = on_disk(tmp_path, content[:100_001])
        try:
            got, report = read(fd, [(3, 100_001 - 3, 0)], nbytes=100_001 - 3)
        finally:
            os.close(fd)
        assert got.tobytes() == content[3:100_001]
        assert report.threads == 1


def test_close_twice_and_read_afterwards(data_file, content, opened):
    fd = opened(data_file)
    for _ in range(3):
        got, report = read_all(fd, len(content))
        assert got.tobytes() == content
        assert report.pinned_nbytes == 0  # host arrays need no pinned memory
        xds.close()
        xds.close()
        assert mover.pinned_nbytes() == 0


def test_close_while_others_read(sized, data_file, content, opened):
    sized(chunk_nbytes=CHUNK)
    fd = opened(data_file)
    stop = threading.Event()
    wrong = []

    def reader():
        while not stop.is_set():
            try:
                got, _ = read_all(fd, len(content))
                if got.tobytes() != content:
                    wrong.append("bytes")
            except CancelledError:
                pass
            except BaseException as error:
                wrong.append(error)
                raise

    threads = [threading.Thread(target=reader) for _ in range(6)]
    for thread in threads:
        thread.start()
    for _ in range(60):
        mover.close()
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


def test_two_hundred_threads(data_file, content, opened):
    fd = opened(data_file)
    wrong = []

    def reader(number):
        offset = number * 997
        nbytes = len(content) - offset - number
        got, _ = read(fd, [(offset, nbytes, 0)], nbytes=nbytes)
        if got.tobytes() != content[offset : offset + nbytes]:
            wrong.append(number)

    threads = [threading.Thread(target=reader, args=(number,)) for number in range(200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_done_is_asked_by_others_while_the_transfer_ends(data_file, content, opened):
    fd = opened(data_file)
    wrong = []
    for _ in range(100):
        array = np.zeros(len(content), np.uint8)
        transfer = MoverTransfer([fd], [data_file])
        stop = threading.Event()

        def ask(transfer=transfer, stop=stop):
            try:
                while not transfer.done():
                    stop.wait(0)
                if transfer.landed_nbytes != len(content):
                    wrong.append(transfer.landed_nbytes)
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        transfer.add(batch_of((0, len(content), array.ctypes.data, 0, 0)), keepalive=array)
        transfer.wait()
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong


# ---- forks ----------------------------------------------------------------------------------------------------------


def test_a_child_reads_afresh_while_the_parent_reads_on(data_file, content, opened, in_child):
    fd = opened(data_file)
    stop = threading.Event()
    wrong = []

    def reader():
        while not stop.is_set():
            got, _ = read_all(fd, len(content))
            if got.tobytes() != content:
                wrong.append("bytes")

    def child():
        for _ in range(3):
            got, _ = read_all(fd, len(content))
            assert got.tobytes() == content
        assert xds.stats()["reads"] > 0
        xds.close()

    threads = [threading.Thread(target=reader) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        codes = [in_child(child) for _ in range(8)]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert codes == [0] * 8
    assert not wrong


def test_a_transfer_of_the_parent_is_of_no_use_in_a_child(data_file, content, opened, in_child):
    array = np.zeros(len(content), np.uint8)
    transfer = MoverTransfer([opened(data_file)], [data_file])
    transfer.add(batch_of((0, len(content), array.ctypes.data, 0, 0)), keepalive=array)

    def child():
        for call in (
            transfer.wait,
            transfer.next_ready,
            transfer.seal,
            transfer.done,
            lambda: transfer.add(segments(1)),
        ):
            with pytest.raises(ForkedProcessError, match="begun by the parent"):
                call()
        transfer.cancel()  # of no effect: what runs is the parent's

    assert in_child(child) == 0
    assert transfer.wait().nbytes == len(content)
    assert array.tobytes() == content


# ---- Ctrl-C ---------------------------------------------------------------------------------------------------------


def test_ctrl_c_while_waiting(sized, tmp_path, opened):
    sized(chunk_nbytes=4096, threads=1, slots=1)
    path = tmp_path / "file"
    path.write_bytes(b"\x01" * (48 * MIB))
    fd = opened(path)
    array = np.zeros(48 * MIB, np.uint8)
    with MoverTransfer([fd], [str(path)]) as transfer:
        # Not sealed by another batch: the wait could not end on its own before the signal comes.
        transfer.add(batch_of((0, array.nbytes, array.ctypes.data, 0, 0)), keepalive=array)
        timer = threading.Timer(0.05, signal.raise_signal, (signal.SIGINT,))

        def sealed():
            timer.start()
            while transfer.next_ready() is not None:
                pass

        with pytest.raises(KeyboardInterrupt):
            sealed()
        timer.join()
        assert transfer.done()
    before = array.copy()
    got, _ = read_all(fd, 4 * MIB)
    assert (got == 1).all()
    assert (array == before).all()


# ---- CPU quota ------------------------------------------------------------------------------------------------------


def machine(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2.5),
        # The tightest of one's own cgroup and those above it.
        (
            {
                "proc/self/cgroup": "0::/pod/container\n",
                "sys/fs/cgroup/cpu.max": "max 100000\n",
                "sys/fs/cgroup/pod/cpu.max": "150000 100000\n",
                "sys/fs/cgroup/pod/container/cpu.max": "400000 100000\n",
                "sys/fs/cgroup/other/cpu.max": "10000 100000\n",
            },
            1.5,
        ),
        # A container without a cgroup namespace: the path is the host's, the mount is ours.
        ({"proc/self/cgroup": "0::/docker/0123\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 0.5),
        # cgroup v1, under its several names.
        (
            {
                "proc/self/cgroup": "5:memory:/m\n4:cpu,cpuacct:/job\n0::/\n",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/memory/m/cpu.max": "10000 100000\n",
            },
            3.0,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu:/job\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            2.0,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu:/elsewhere\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "50000\n",
            },
            2.0,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "\n"}, None),
    ],
)
def test_cpu_quota(tmp_path, files, expected):
    assert cpu.quota(machine(tmp_path, files)) == expected


def test_usable_cpus(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert cpu.usable_cpus(machine(tmp_path / "none", {})) == 8
    for quota, expected in (("10000", 1), ("50000", 1), ("160000", 2), ("350000", 4), ("9900000", 8)):
        root = machine(tmp_path / quota, {"sys/fs/cgroup/cpu.max": f"{quota} 100000"})
        assert cpu.usable_cpus(root) == expected


def run_script(script, *arguments, **environment):
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=110, check=False
    )


def test_idle_transfers_take_no_turns_of_others(tmp_path):
    """Jobs that end between two looks of a thread must not make it overlook the next one."""
    done = run_script(
        """
        import os, sys
        import numpy as np
        from xds.engine.mover import MoverTransfer
        from xds.plan import segments

        path = sys.argv[1]
        with open(path, "wb") as file:
            file.write(bytes(300_000))
        fd = os.open(path, os.O_RDONLY)

        def begin(nbytes):
            array = np.ones(nbytes, np.uint8)
            batch = segments(1)
            batch[0] = (0, nbytes, array.ctypes.data, 0, 0)
            transfer = MoverTransfer([fd], [path], timeout_s=5.0)
            transfer.add(batch, keepalive=array)
            return transfer

        idle = begin(1000)  # never sealed
        for _ in range(150):
            pair = [begin(100_000), begin(200_000)]
            for transfer in pair:
                transfer.seal()
            for transfer in pair:
                transfer.wait()
        """,
        tmp_path / "data",
        XDS_MOVER_THREADS="1",
    )
    assert done.returncode == 0, done.stderr


def test_a_handler_of_sigbus_set_after_ours(tmp_path):
    """Mapped copies rely on our handler; once somebody replaces it they are over, and a cut file is an error still."""
    done = run_script(
        """
        import faulthandler, os, sys
        import numpy as np
        from xds.engine.mover import MoverTransfer
        from xds.errors import ShortReadError
        from xds.plan import segments

        path = sys.argv[1]
        nbytes = 4_000_000
        with open(path, "wb") as file:
            file.write(bytes(nbytes))
        fd = os.open(path, os.O_RDONLY)

        def read():
            array = np.ones(nbytes, np.uint8)
            batch = segments(1)
            batch[0] = (0, nbytes, array.ctypes.data, 0, 0)
            with MoverTransfer([fd], [path]) as transfer:
                transfer.add(batch, keepalive=array)
                return transfer.wait()

        assert read().method == {"mapped": nbytes}
        faulthandler.enable()
        os.truncate(path, 100_000)
        try:
            read()
        except ShortReadError:
            print("refused")
        os.truncate(path, nbytes)
        assert read().method == {"pread": nbytes}
        """,
        tmp_path / "data",
        XDS_MOVER_FORBID="pread,uring,direct",
    )
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr


def test_no_memory_for_segments(tmp_path):
    done = run_script(
        """
        import errno, os, resource, sys
        import numpy as np
        from xds.engine.mover import MoverTransfer
        from xds.errors import XdsError
        from xds.plan import segments

        path = sys.argv[1]
        with open(path, "wb") as file:
            file.write(bytes(100_000))
        fd = os.open(path, os.O_RDONLY)
        array = np.ones(1, np.uint8)
        batch = segments(4_000_000)
        batch["nbytes"] = 1
        batch["destination"] = array.ctypes.data
        MoverTransfer([fd], [path]).cancel()
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (20 << 20), -1))
        transfer = MoverTransfer([fd], [path])
        try:
            transfer.add(batch, keepalive=array)
        except XdsError as error:
            assert error.errno == errno.ENOMEM
            print("no memory")
        """,
        tmp_path / "data",
    )
    assert (done.returncode, done.stdout) == (0, "no memory\n"), done.stderr


def test_finalizers_may_count_while_a_report_is_counted():
    """A transfer that dies in a garbage collection inside ``Totals.add`` counts an error there."""
    totals = TOTALS
    with totals._lock:
        totals.add_error()
        totals.add(ReadReport())


def test_arrays_of_a_dropped_transfer_stay_until_it_has_come_to_rest(tmp_path, monkeypatch):
    """Whatever interrupts the way out of a transfer: here nobody drains at all."""
    path = tmp_path / "data"
    path.write_bytes(bytes(1 << 20))
    descriptor = os.open(path, os.O_RDONLY)
    array = np.ones(1 << 20, np.uint8)
    alive = weakref.ref(array)
    batch = segments(1)
    batch[0] = (0, array.nbytes, array.ctypes.data, 0, 0)
    try:
        transfer = MoverTransfer([descriptor], [str(path)])
        transfer.add(batch, keepalive=array)
        monkeypatch.setattr(MoverTransfer, "_stop", lambda self: False)
        hold = transfer._hold
        del transfer, array
        gc.collect()
        assert alive() is not None
        assert hold in mover._PROCESS.held
        mover._PROCESS.native.job_cancel(hold.job)
        while not mover._PROCESS.native.job_drained(hold.job):
            time.sleep(0.001)
        mover._PROCESS.sweep()
        assert hold not in mover._PROCESS.held
        del hold
        gc.collect()
        assert alive() is None
    finally:
        os.close(descriptor)


def test_transfers_are_not_copied():
    transfer = MoverTransfer([], [])
    for refused in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            refused(transfer)
    transfer.cancel()
