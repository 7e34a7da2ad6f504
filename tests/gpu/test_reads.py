"""Reads into GPU arrays: bytes, ranges, streams, devices, reports, what is refused."""

from __future__ import annotations

import os
import random
import threading

import numpy as np
import pytest
from fake_gpu import FRESH, Interface

import xds
from xds.arrays import destination
from xds.engine import cuda, mover
from xds.engine.mover import MoverTransfer
from xds.engine.settings import METHODS, RING_LIMIT_NBYTES
from xds.errors import ArrayError, DeviceError, FileChangedError, RangeError, RequirementError
from xds.plan import segments

pytestmark = pytest.mark.gpu

MIB = 1 << 20
SMALL = {"threads": 2, "slots": 2, "chunk_nbytes": 65536}


def forbid_but(*methods):
    return ",".join(name for name in METHODS if name not in methods)


def test_the_driver_is_seen(gpu):
    count, reason = cuda.device_count()
    assert (count, reason) == (gpu.devices, "")
    name, version = cuda.device_name(0)
    assert name
    assert version >= 12000
    free, total = cuda.memory(0)
    assert 0 < free <= total
    array = gpu.empty(100)
    assert cuda.pointer(gpu.address(array)) == cuda.Pointer(0, False)
    assert cuda.pointer(np.zeros(10).ctypes.data) is None
    with pytest.raises(DeviceError, match="answered error"):
        cuda.device_name(99)
    with pytest.raises(DeviceError, match="answered error"):
        cuda.memory(99)


@pytest.mark.parametrize("method", ["pread", "mapped", "buffered", "direct", "uring"])
@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 65537, 3 * MIB])
def test_every_method_gives_the_right_bytes(gpu, sized, fs, data_file, content, method, nbytes):
    sized(forbid=forbid_but(method), **SMALL)
    array = gpu.empty(nbytes + 50)
    inner = Interface(gpu.address(array) + 7, nbytes, keepalive=array)
    with fs.open(data_file) as file:
        file.seek(11)
        assert file.readinto(inner) == nbytes
        report = file.report
    got = gpu.tohost(array)
    assert got[7 : 7 + nbytes] == content[11 : 11 + nbytes]
    assert got[:7] + got[7 + nbytes :] == bytes([FRESH]) * 50
    assert report.placement == {"copy": nbytes}
    assert report.posting == {"host": nbytes}
    assert sum(report.method.values()) == report.nbytes == nbytes
    assert report.device == 0
    assert 0 < report.pinned_nbytes <= RING_LIMIT_NBYTES


@pytest.mark.parametrize("nbytes", [0, 1, 5000, 2 * MIB])
def test_pread_gives_a_future(gpu, fs, data_file, content, nbytes):
    array = gpu.empty(nbytes)
    with fs.open(data_file) as file:
        futures = [file.pread(array, offset=17) for _ in range(3)]
        assert [future.result(60) for future in futures] == [nbytes] * 3
        assert all(future.done() for future in futures)
        assert file.tell() == 0
        assert gpu.tohost(array) == content[17 : 17 + nbytes]
        if nbytes:
            assert futures[0].report.placement == {"copy": nbytes}
        with pytest.raises(ArrayError, match="into an array of"):
            file.pread(array, nbytes + 1)
        with pytest.raises(RangeError, match="negative"):
            file.pread(array, nbytes, -1)


def test_the_end_of_the_file(gpu, fs, data_file, content):
    array = gpu.empty(1000)
    with fs.open(data_file) as file:
        file.seek(-300, 2)
        assert file.readinto(array) == 300
        assert file.readinto(array) == 0
    assert gpu.tohost(array) == content[-300:] + bytes([FRESH]) * 700


def test_many_small_ranges_of_many_files_into_host_and_device(gpu, sized, fs, tmp_path):
    sized(**SMALL)
    pick = random.Random(3)
    data = [pick.randbytes(pick.randrange(1, 90_000)) for _ in range(25)]
    paths = []
    for number, piece in enumerate(data):
        (tmp_path / str(number)).write_bytes(piece)
        paths.append(str(tmp_path / str(number)))
    names, starts, ends, arrays, expected = [], [], [], [], []
    for _ in range(700):
        number = pick.randrange(len(paths))
        start = pick.randrange(len(data[number]) + 1)
        end = pick.choice([start, len(data[number]), min(start + pick.randrange(4000), len(data[number]))])
        names.append(paths[number])
        starts.append(start)
        ends.append(end)
        expected.append(data[number][start:end])
        arrays.append(np.empty(end - start, np.uint8) if pick.random() < 0.3 else gpu.empty(end - start))
    report = fs.readinto_ranges(names, starts, ends, arrays)
    for array, wanted in zip(arrays, expected, strict=True):
        assert (array.tobytes() if isinstance(array, np.ndarray) else gpu.tohost(array)) == wanted
    assert report.nbytes == sum(map(len, expected))
    assert set(report.placement) == {"mapped", "copy"}
    assert sum(report.placement.values()) == report.nbytes
    assert fs.readinto_ranges([paths[0]], [5], [5], [gpu.empty(0)]).nbytes == 0


def test_ranges_of_the_wrong_size_or_place(gpu, fs, data_file):
    array = gpu.empty(100)
    with pytest.raises(ArrayError, match="give an array of the size of the range"):
        fs.readinto_ranges([data_file], [0], [99], [array])
    with pytest.raises(ArrayError, match="overlap"):
        fs.readinto_ranges([data_file] * 2, [0, 0], [100, 100], [array, array])
    assert gpu.tohost(array) == bytes([FRESH]) * 100


# ---- streams --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["object", "handle", "of the array"])
def test_a_read_lands_after_what_the_stream_does_before(gpu, fs, data_file, content, form):
    array, stream = gpu.empty(2 * MIB), gpu.stream()
    for _ in range(2):
        gpu.busy(stream, 0.2)
        gpu.fill(stream, array, 0x77)
        with fs.open(data_file) as file:
            if form == "of the array":
                with gpu.current(stream, array):
                    assert file.readinto(array) == 2 * MIB
            else:
                assert file.readinto(array, stream=stream if form == "object" else stream.ptr) == 2 * MIB
        assert gpu.tohost(array) == content[: 2 * MIB]


def test_ranges_and_futures_are_ordered_too(gpu, fs, data_file, content):
    arrays, stream = [gpu.empty(MIB), gpu.empty(MIB)], gpu.stream()
    gpu.busy(stream, 0.2)
    for array in arrays:
        gpu.fill(stream, array, 0x77)
    fs.readinto_ranges([data_file] * 2, [0, MIB], [MIB, 2 * MIB], arrays, stream=stream)
    assert gpu.tohost(arrays[0]) + gpu.tohost(arrays[1]) == content[: 2 * MIB]
    gpu.busy(stream, 0.2)
    gpu.fill(stream, arrays[0], 0x77)
    with fs.open(data_file) as file:
        future = file.pread(arrays[0], offset=5, stream=stream)
        assert future.get() == MIB
    assert gpu.tohost(arrays[0]) == content[5 : 5 + MIB]


def test_an_idle_stream_does_not_wait_for_a_busy_one(gpu, fs, data_file, content):
    busy, idle = gpu.stream(), gpu.stream()
    array = gpu.empty(MIB)
    gpu.busy(busy, 0.2)
    with fs.open(data_file) as file:
        assert file.readinto(array, stream=idle) == MIB
    assert gpu.tohost(array) == content[:MIB]


def test_what_is_no_stream_is_refused(gpu, fs, data_file):
    array = gpu.empty(10)
    with fs.open(data_file) as file, pytest.raises(ValueError, match="no CUDA stream"):
        file.readinto(array, stream="fast")


def test_a_stream_that_the_driver_does_not_know(fake, fs, data_file):
    array = fake.empty(10)
    with fs.open(data_file) as file, pytest.raises(DeviceError, match="event on stream 4660"):
        file.readinto(array, stream=0x1234)


# ---- devices and memory ---------------------------------------------------------------------------------------------


def test_arrays_of_two_devices(two, fs, data_file, content):
    arrays = [two.empty(MIB, device=1), two.empty(MIB, device=0), two.empty(MIB, device=1)]
    with fs.open(data_file) as file:
        assert file.readinto(arrays[0]) == MIB
        assert file.report.device == 1
    assert two.tohost(arrays[0]) == content[:MIB]
    report = fs.readinto_ranges([data_file] * 3, [0, 5, 9], [MIB, MIB + 5, MIB + 9], arrays)
    assert [two.tohost(array) for array in arrays] == [content[at : at + MIB] for at in (0, 5, 9)]
    assert report.device is None
    assert report.nbytes == 3 * MIB


def begin(data_file, device, address, nbytes=100):
    fd = os.open(data_file, os.O_RDONLY)
    try:
        with MoverTransfer([fd], [data_file], device=device) as transfer:
            batch = segments(1)
            batch[0] = (0, nbytes, address, 0, 0)
            transfer.add(batch, stream=0)
            return transfer.wait()
    finally:
        os.close(fd)


def test_memory_of_another_device_is_refused(two, data_file):
    array = two.empty(100, device=1)
    with pytest.raises(ArrayError, match="is memory of device 1, expected memory of CUDA device 0"):
        begin(data_file, 0, two.address(array))


def test_host_memory_is_refused(gpu, fs, data_file):
    array = np.zeros(100, np.uint8)
    with pytest.raises(ArrayError, match="is host memory, expected memory of CUDA device 0"):
        begin(data_file, 0, array.ctypes.data)
    with fs.open(data_file) as file, pytest.raises(ArrayError, match="does not know its pointer"):
        file.readinto(Interface(array.ctypes.data, 100))
    assert not array.any()


def test_managed_memory_is_refused(gpu, fs, data_file):
    array = gpu.managed(4096)
    with fs.open(data_file) as file, pytest.raises(ArrayError, match="managed"):
        file.readinto(array)
    with pytest.raises(ArrayError, match="managed memory"):
        begin(data_file, 0, array.__cuda_array_interface__["data"][0])


def test_a_device_that_is_not_there(gpu, data_file):
    with pytest.raises(DeviceError, match=f"CUDA device 99 does not exist: {gpu.devices} usable"):
        begin(data_file, 99, 0)
    with pytest.raises(DeviceError, match="CUDA device -1 does not exist"):
        begin(data_file, -1, 0)


def test_what_the_interface_says_is_believed_only_so_far(gpu, fs, data_file):
    array = gpu.empty(100)
    read_only = Interface(gpu.address(array), 100)
    read_only.__cuda_array_interface__["data"] = (gpu.address(array), True)
    strided = Interface(gpu.address(array), 50)
    strided.__cuda_array_interface__["strides"] = (2,)
    for wrong, words in ((read_only, "read-only"), (strided, "C-contiguous")):
        with fs.open(data_file) as file, pytest.raises(ArrayError, match=words):
            file.readinto(wrong)
    assert destination(array).nbytes == 100


# ---- reports and the ring -------------------------------------------------------------------------------------------


def test_require(gpu, fs, data_file, content):
    array = gpu.empty(1000)
    with fs.open(data_file) as file:
        assert file.readinto(array, require={"posting": "host", "placement": "copy"}) == 1000
        for require in ({"posting": "gpu"}, {"placement": "dma"}, {"placement": "mapped"}):
            with pytest.raises(RequirementError):
                file.readinto(array, require=require)
    assert gpu.tohost(array) == content[:1000]


def test_the_ring_stays_within_its_limit(gpu, sized, fs, tmp_path):
    sized()
    path = tmp_path / "large"
    data = random.Random(9).randbytes(MIB)
    with path.open("wb") as file:
        for _ in range(96):
            file.write(data)
    array = gpu.empty(96 * MIB)
    with fs.open(str(path)) as file:
        assert file.readinto(array) == 96 * MIB
        assert 0 < file.report.pinned_nbytes <= RING_LIMIT_NBYTES
    assert gpu.tohost(array) == data * 96
    assert 0 < mover.pinned_nbytes() <= RING_LIMIT_NBYTES
    if not gpu.real:
        assert 0 < gpu.get("registered_peak_nbytes") <= RING_LIMIT_NBYTES
    xds.close()
    xds.close()
    assert mover.pinned_nbytes() == 0
    with fs.open(str(path)) as file:
        assert file.readinto(array) == 96 * MIB


def test_many_threads(gpu, sized, fs, data_file, content):
    sized(**SMALL)
    wrong = []

    def reader(number):
        nbytes = 50_000 + number
        array = gpu.empty(nbytes) if number % 3 else np.empty(nbytes, np.uint8)
        with fs.open(data_file) as file:
            file.seek(number)
            file.readinto(array)
        got = gpu.tohost(array) if number % 3 else array.tobytes()
        if got != content[number : number + nbytes]:
            wrong.append(number)

    threads = [threading.Thread(target=reader, args=(number,)) for number in range(60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---- files that change ----------------------------------------------------------------------------------------------


def test_a_file_that_shrinks_in_the_middle(gpu, sized, fs, tmp_path, content):
    sized(**SMALL)
    path = tmp_path / "file"
    path.write_bytes(content)
    array, stream = gpu.empty(len(content)), gpu.stream()
    gpu.busy(stream, 1.0)  # the ring is full long before the end of the file
    with fs.open(str(path)) as file:
        future = file.pread(array, stream=stream)
        os.truncate(path, MIB)
        with pytest.raises(FileChangedError, match="changed"):
            future.get()
    with fs.open(str(path)) as file:
        assert file.readinto(array) == MIB
    assert gpu.tohost(array)[:MIB] == content[:MIB]


def test_a_file_that_is_replaced_in_the_middle(gpu, sized, fs, tmp_path, content):
    sized(**SMALL)
    path = tmp_path / "file"
    path.write_bytes(content)
    (tmp_path / "other").write_bytes(content[::-1])
    array, stream = gpu.empty(len(content)), gpu.stream()
    gpu.busy(stream, 0.5)
    with fs.open(str(path)) as file:
        future = file.pread(array, stream=stream)
        (tmp_path / "other").replace(path)
        with pytest.raises(FileChangedError, match="another file"):
            future.get()
