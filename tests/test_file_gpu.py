"""Reads into GPU arrays. The host twin of each test is in test_file and test_filesystem."""

from __future__ import annotations

import numpy as np
import pytest

from xds.arrays import destination
from xds.errors import ArrayError, RequirementError

pytestmark = pytest.mark.gpu


class Cupy:
    def __init__(self):
        self.module = pytest.importorskip("cupy", reason="CuPy is not installed")
        if not self.module.cuda.is_available():
            pytest.skip("no CUDA device")

    def full(self, nbytes):
        return self.module.full(nbytes, 7, self.module.uint8)

    def host(self, array):
        return self.module.asnumpy(array)

    def stream(self):
        stream = self.module.cuda.Stream(non_blocking=True)
        return stream, stream.ptr

    def on(self, stream):
        return stream

    def address(self, array):
        return array.data.ptr


class Torch:
    def __init__(self):
        self.module = pytest.importorskip("torch", reason="torch is not installed")
        if not self.module.cuda.is_available():
            pytest.skip("no CUDA device")

    def full(self, nbytes):
        return self.module.full((nbytes,), 7, dtype=self.module.uint8, device="cuda")

    def host(self, array):
        return array.cpu().numpy()

    def stream(self):
        stream = self.module.cuda.Stream()
        return stream, stream.cuda_stream

    def on(self, stream):
        return self.module.cuda.stream(stream)

    def address(self, array):
        return array.data_ptr()


@pytest.fixture(params=[Cupy, Torch])
def gpu(request):
    """One framework with a GPU."""
    return request.param()


class OnlyInterface:
    """An array that has nothing but ``__cuda_array_interface__``."""

    def __init__(self, array):
        self.__cuda_array_interface__ = array.__cuda_array_interface__
        self.array = array


def test_destinations(gpu):
    array = gpu.full(100)
    stream, handle = gpu.stream()
    for form in (array, OnlyInterface(array)):
        target = destination(form)
        assert (target.address, target.nbytes, target.device) == (gpu.address(array), 100, 0)
        assert destination(form, stream=stream).stream == destination(form, stream=handle).stream == handle
    with gpu.on(stream):
        assert destination(array).stream == handle
    with pytest.raises(ArrayError, match="C-contiguous"):
        destination(array[::2])


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 3 << 20])
def test_readinto_pread_and_ranges(gpu, fs, data_file, content, nbytes):
    array = gpu.full(nbytes)
    with fs.open(data_file, cache_type="readahead") as file:
        file.seek(11)
        assert file.readinto(array) == nbytes
        assert gpu.host(array).tobytes() == content[11 : 11 + nbytes]
        assert file.report.placement.get("copy", 0) == nbytes
        assert file.pread(array, offset=5).get() == nbytes
        assert gpu.host(array).tobytes() == content[5 : 5 + nbytes]
    host = np.zeros(nbytes, np.uint8)
    report = fs.readinto_ranges([data_file] * 2, [1, 2], [1 + nbytes, 2 + nbytes], [array, host])
    assert gpu.host(array).tobytes() == content[1 : 1 + nbytes]
    assert host.tobytes() == content[2 : 2 + nbytes]
    assert report.nbytes == 2 * nbytes


def test_short_only_at_the_end(gpu, fs, data_file, content):
    array = gpu.full(1000)
    with fs.open(data_file) as file:
        file.seek(-300, 2)
        assert file.readinto(array) == 300
    got = gpu.host(array)
    assert got[:300].tobytes() == content[-300:]
    assert (got[300:] == 7).all()


def test_require(gpu, fs, data_file):
    array = gpu.full(1000)
    with fs.open(data_file) as file:
        assert file.readinto(array, require={"posting": "host", "placement": "copy"}) == 1000
        for require in ({"posting": "gpu"}, {"placement": "mapped"}, {"placement": "dma"}):
            with pytest.raises(RequirementError):
                file.readinto(array, require=require)


def test_a_stream_orders_the_read_behind_its_work(gpu, fs, data_file, content):
    # The fills come before the read on the stream, however long they take.
    stream, _ = gpu.stream()
    array = gpu.full(3 << 20)
    with gpu.on(stream):
        for value in range(200):
            array[:] = value
        with fs.open(data_file) as file:
            assert file.readinto(array, stream=stream) == 3 << 20
        stream.synchronize()
    assert gpu.host(array).tobytes() == content[: 3 << 20]


def test_managed_memory_is_refused():
    cupy = Cupy().module
    memory = cupy.cuda.malloc_managed(100)
    array = cupy.ndarray((100,), cupy.uint8, memory)
    with pytest.raises(ArrayError, match="managed"):
        destination(OnlyInterface(array))
