"""Reads into GPU arrays that end badly: no memory, failing and hanging copies, Ctrl-C, forks."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import xds
from xds.engine import cuda, mover
from xds.errors import (
    CancelledError,
    DeviceError,
    DeviceMemoryError,
    ForkedProcessError,
    ReadTimeoutError,
)

pytestmark = pytest.mark.gpu

MIB = 1 << 20
SMALL = {"threads": 2, "slots": 2, "chunk_nbytes": 65536}


def assert_reads(gpu, fs, path, content):
    array = gpu.empty(len(content))
    with fs.open(path) as file:
        assert file.readinto(array) == len(content)
    assert gpu.tohost(array) == content


def drained():
    deadline = time.monotonic() + 30
    while mover._PROCESS.held:
        assert time.monotonic() < deadline
        mover._PROCESS.sweep()
        time.sleep(0.01)


@pytest.mark.parametrize("call", [1, 3])
def test_no_memory_for_the_ring(fake, sized, fs, data_file, content, call):
    sized(**SMALL)
    fake.set("fail_register", call)
    array = fake.empty(len(content))
    with fs.open(data_file) as file:
        with pytest.raises(DeviceMemoryError, match=f"the staging ring needs {2 * 2 * 65536} bytes") as caught:
            file.readinto(array)
        assert "pinning the staging ring" in str(caught.value)
        assert "CUDA_ERROR_OUT_OF_MEMORY" in str(caught.value)
        assert isinstance(caught.value, MemoryError)
        assert caught.value.errno == errno.ENOMEM
    assert_reads(fake, fs, data_file, content)


@pytest.mark.parametrize("call", [1, 2, 9])
def test_a_copy_that_is_refused(fake, sized, fs, data_file, content, call):
    sized(**SMALL)
    fake.set("code_copy", 700)
    fake.set("fail_copy", call)
    array = fake.empty(len(content))
    with fs.open(data_file) as file, pytest.raises(DeviceError, match="copy to the GPU: CUDA_ERROR_ILLEGAL_ADDRESS"):
        file.readinto(array)
    assert_reads(fake, fs, data_file, content)


def test_a_refused_copy_of_many(fake, sized, fs, data_file, content):
    # Others of the same chunk are on their way: nothing is given back before they are over.
    sized(**SMALL)
    arrays = [fake.empty(1000 + number) for number in range(200)]
    starts = [number * 5000 for number in range(200)]
    ends = [start + array.nbytes for start, array in zip(starts, arrays, strict=True)]
    fake.set("copy_delay_us", 300)
    fake.set("code_copy", 700)
    fake.set("fail_copy", 60)
    with pytest.raises(DeviceError, match="ILLEGAL_ADDRESS"):
        fs.readinto_ranges([data_file] * 200, starts, ends, arrays)
    copies = fake.get("copies")
    before = [fake.tohost(array) for array in arrays]
    time.sleep(0.05)
    assert fake.get("copies") == copies
    assert before == [fake.tohost(array) for array in arrays]
    fs.readinto_ranges([data_file] * 200, starts, ends, arrays)
    assert [fake.tohost(array) for array in arrays] == [content[s:e] for s, e in zip(starts, ends, strict=True)]


def test_an_event_that_cannot_be_recorded(fake, sized, fs, data_file, content):
    """The copies before it run all the same: the array is given back when they are over."""
    sized(**SMALL)
    array = fake.empty(len(content))
    fake.set("copy_delay_us", 2000)
    fake.set("code_record", 700)
    fake.set("fail_record", 2)  # the first record is the caller's stream's
    with fs.open(data_file) as file, pytest.raises(DeviceError):
        file.readinto(array)
    drained()
    copies = fake.get("copies")
    time.sleep(0.05)
    assert fake.get("copies") == copies
    fake.set("copy_delay_us", 0)
    fake.set("fail_record", 0)
    assert_reads(fake, fs, data_file, content)


def test_a_copy_engine_that_hangs(fake, sized, fs, data_file, content, monkeypatch):
    monkeypatch.setattr(mover, "_DRAIN_S", 0.2)
    sized(**SMALL)
    array = fake.empty(len(content))
    fake.set("hang", 1)
    begin = time.monotonic()
    with fs.open(data_file) as file, pytest.raises(ReadTimeoutError, match=r"no byte arrived for 0\.3 s") as caught:
        file.readinto(array, timeout_s=0.3)
    assert time.monotonic() - begin < 60  # bounded, that is all
    assert caught.value.errno == errno.ETIMEDOUT
    assert mover._PROCESS.held
    fake.set("hang", 0)
    drained()
    copies = fake.get("copies")
    time.sleep(0.05)
    assert fake.get("copies") == copies
    assert_reads(fake, fs, data_file, content)
    assert not mover._PROCESS.held


def test_a_future_that_hangs_is_dropped(fake, sized, fs, data_file, content, monkeypatch):
    monkeypatch.setattr(mover, "_DRAIN_S", 0.2)
    sized(**SMALL)
    array = fake.empty(len(content))
    fake.set("hang", 1)
    with fs.open(data_file) as file:
        future = file.pread(array)
        assert not future.done()
        with pytest.raises(TimeoutError, match="still runs"):
            future.result(0.05)
        del future
    del array  # the memory stays: a copy into it is queued
    assert mover._PROCESS.held
    fake.set("hang", 0)
    drained()
    assert_reads(fake, fs, data_file, content)


def test_close_while_the_copy_engine_hangs(fake, sized, fs, data_file, content):
    sized(**SMALL)
    array = fake.empty(len(content))
    fake.set("hang", 1)
    with fs.open(data_file) as file:
        future = file.pread(array)
        xds.close()
        xds.close()
        fake.set("hang", 0)
        with pytest.raises(CancelledError):
            future.get()
    # What close left to the threads that hung is freed by the last of them, or by the last one who held the read.
    del future
    deadline = time.monotonic() + 30
    while fake.get("registered_nbytes"):
        assert time.monotonic() < deadline
        gc.collect()
        time.sleep(0.01)
    assert_reads(fake, fs, data_file, content)


def test_a_slow_copy_engine_is_no_time_out(fake, sized, fs, data_file, content):
    sized(**SMALL)
    fake.set("copy_delay_us", 20000)
    array = fake.empty(len(content))
    with fs.open(data_file) as file:
        assert file.readinto(array, timeout_s=0.5) == len(content)
    assert fake.tohost(array) == content


def test_close_while_others_read(gpu, sized, fs, data_file, content):
    sized(**SMALL)
    stop, wrong = threading.Event(), []

    def reader():
        array = gpu.empty(len(content))
        while not stop.is_set():
            try:
                with fs.open(data_file) as file:
                    file.readinto(array)
                if gpu.tohost(array) != content:
                    wrong.append("bytes")
            except CancelledError:
                pass
            except BaseException as error:
                wrong.append(error)
                raise

    threads = [threading.Thread(target=reader) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(30):
        xds.close()
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


def test_ctrl_c_in_the_middle(gpu, sized, fs, data_file, content):
    sized(**SMALL)
    array, stream = gpu.empty(len(content)), gpu.stream()
    gpu.busy(stream, 1.0)
    timer = threading.Timer(0.2, signal.raise_signal, (signal.SIGINT,))
    with fs.open(data_file) as file:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            file.readinto(array, stream=stream)
    timer.join()
    before = gpu.tohost(array)
    assert before != content
    assert_reads(gpu, fs, data_file, content)
    assert gpu.tohost(array) == before


def test_ctrl_c_in_the_middle_of_a_future(gpu, sized, fs, data_file, content):
    sized(**SMALL)
    array, stream = gpu.empty(len(content)), gpu.stream()
    gpu.busy(stream, 1.0)
    timer = threading.Timer(0.2, signal.raise_signal, (signal.SIGINT,))
    with fs.open(data_file) as file:
        future = file.pread(array, stream=stream)
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            future.get()
        timer.join()
        with pytest.raises(RuntimeError, match="interrupted"):
            future.get()
    before = gpu.tohost(array)
    assert before != content
    assert_reads(gpu, fs, data_file, content)
    assert gpu.tohost(array) == before


def test_a_child_reads_into_host_memory_alone(gpu, fs, data_file, content, in_child):
    assert_reads(gpu, fs, data_file, content)
    array = gpu.empty(len(content))
    address = gpu.address(array)

    def child():
        host = np.zeros(len(content), np.uint8)
        with fs.open(data_file) as file:
            assert file.readinto(host) == len(content)
            assert host.tobytes() == content
            with pytest.raises(ForkedProcessError, match="spawn or forkserver"):
                file.readinto(array)
        with pytest.raises(ForkedProcessError, match="spawn or forkserver"):
            fs.readinto_ranges([data_file], [0], [len(content)], [array])
        with pytest.raises(ForkedProcessError, match="spawn or forkserver"):
            mover.MoverTransfer([0], ["file"], device=0)
        with pytest.raises(ForkedProcessError):
            cuda.pointer(address)
        assert cuda.device_count()[0] == 0
        xds.close()

    for _ in range(3):
        assert in_child(child) == 0
        assert_reads(gpu, fs, data_file, content)


def test_a_child_of_a_parent_that_never_read(fake, in_child):
    # The driver was initialised by somebody else in the parent; that XDS did not know before makes no difference.
    def child():
        cuda._Use.inherited = False
        with pytest.raises(ForkedProcessError, match="spawn or forkserver"):
            mover.MoverTransfer([0], ["file"], device=0)

    assert in_child(child) == 0


EXIT = """
import ctypes, os, sys, time
import fsspec
from fake_gpu import FakeGpu
gpu = FakeGpu()
file = fsspec.filesystem("xds").open(sys.argv[1])
array = gpu.empty(file.size)
gpu.set(sys.argv[2], int(sys.argv[3]))
future = file.pread(array)
while gpu.get("registered_nbytes") == 0:
    time.sleep(0.001)
print("running", flush=True)
"""


@pytest.mark.parametrize(("knob", "value"), [("copy_delay_us", 3000), ("hang", 1)])
def test_the_interpreter_ends_while_copies_run(fake, data_file, knob, value):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", EXIT, data_file, knob, str(value)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "running\n", "")
