"""Two GPUs for the tests in ``gpu``: the real one through CuPy, and the driver of ``gpu/fake_cuda.cpp``."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os

import numpy as np

from xds.errors import DeviceMemoryError
from xds.interop import Block, Framework
from xds.interop.dtypes import packed_nbytes

#: What new memory holds.
FRESH = 0xA5


class RealGpu:
    """The GPU of this machine."""

    real = True
    devices = property(lambda self: self.cupy.cuda.runtime.getDeviceCount())

    def __init__(self):
        import cupy

        self.cupy = cupy

    def empty(self, nbytes, device=0):
        with self.cupy.cuda.Device(device):
            array = self.cupy.full(nbytes, FRESH, self.cupy.uint8)
            self.cupy.cuda.Device(device).synchronize()
            return array

    def managed(self, nbytes):
        memory = self.cupy.cuda.malloc_managed(nbytes)
        return Interface(memory.ptr, nbytes, keepalive=memory)

    def tohost(self, array):
        if array.nbytes == 0:
            return b""
        flat = self.cupy.ndarray((array.nbytes,), self.cupy.uint8, array.data)
        return self.cupy.asnumpy(flat).tobytes()

    def address(self, array):
        return array.data.ptr

    def device(self, array):
        return array.device.id

    def stream(self):
        return self.cupy.cuda.Stream(non_blocking=True)

    def current(self, stream, array):
        """A context in which ``stream`` is the one that ``array`` is used on."""
        return stream

    @functools.cached_property
    def _spin(self):
        code = """
        extern "C" __global__ void spin(long long ns) {
            long long begin, now;
            asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
            do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - begin < ns);
        }"""
        return self.cupy.RawKernel(code, "spin")

    def prepare(self):
        """Make what the first use of a stream would make, which may wait for the device."""
        self._spin((1,), (1,), (np.int64(1),))
        self.cupy.zeros(1, self.cupy.uint8).fill(1)
        self.cupy.cuda.Device().synchronize()

    def busy(self, stream, seconds):
        with stream:
            self._spin((1,), (1,), (np.int64(seconds * 1e9),))

    def fill(self, stream, array, value):
        self.cupy.cuda.runtime.memsetAsync(array.data.ptr, value, array.nbytes, stream.ptr)

    @contextlib.contextmanager
    def without_memory(self):
        """A context in which no block of memory can be had."""
        with self.cupy.cuda.using_allocator(self.cupy.cuda.MemoryPool().malloc):
            pool = self.cupy.cuda.MemoryPool()
            pool.set_limit(size=1)
            with self.cupy.cuda.using_allocator(pool.malloc):
                yield

    def close(self):
        pass


class Interface:
    """What says that it is an array on a GPU, and nothing else."""

    def __init__(self, address, nbytes, *, stream=None, keepalive=None):
        data = (address if nbytes else 0, False)
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": data, "version": 3}
        if stream is not None:
            self.__cuda_array_interface__["stream"] = stream
        self.nbytes = nbytes
        self.keepalive = keepalive


class FakeArray(Interface):
    """Bytes in the memory of the fake driver."""

    def __init__(self, address, nbytes, *, device, owner, stream=None):
        super().__init__(address, nbytes, stream=stream, keepalive=owner)
        self.address = address
        self.device = device


class _Memory:
    def __init__(self, gpu, nbytes, device):
        address = ctypes.c_ulonglong()
        with gpu.on(device):
            self.code = gpu.library.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(nbytes))
        self.address = address.value
        self._free = gpu.library.cuMemFree_v2

    def __del__(self):
        if not self.code:
            self._free(ctypes.c_ulonglong(self.address))


class FakeStream:
    """A stream of the fake driver."""

    def __init__(self, gpu):
        handle = ctypes.c_void_p()
        with gpu.on(0):
            gpu.check(gpu.library.cuStreamCreate(ctypes.byref(handle), 1))
        self.ptr = handle.value


class FakeGpu:
    """Two devices in host memory, and knobs for what goes wrong."""

    real = False
    devices = 2

    def __init__(self):
        self.library = ctypes.CDLL(os.environ["XDS_CUDA_LIBRARY"])
        self.library.fake_cuda_get.restype = ctypes.c_int64
        self.check(self.library.cuInit(0))
        self._set = set()

    @staticmethod
    def check(code):
        assert code == 0, f"the fake driver answered {code}"

    @contextlib.contextmanager
    def on(self, device):
        popped = ctypes.c_void_p()
        self.check(self.library.cuCtxPushCurrent_v2(ctypes.c_void_p(device + 1)))
        yield
        self.check(self.library.cuCtxPopCurrent_v2(ctypes.byref(popped)))

    def set(self, knob, value):
        self._set.add(knob)
        self.library.fake_cuda_set(knob.encode(), ctypes.c_int64(value))

    def get(self, counter):
        return self.library.fake_cuda_get(counter.encode())

    def empty(self, nbytes, device=0):
        memory = _Memory(self, nbytes, device)
        self.check(memory.code)
        return FakeArray(memory.address, nbytes, device=device, owner=memory)

    def managed(self, nbytes):
        self.set("managed", 1)
        return self.empty(nbytes)

    def tohost(self, array):
        got = ctypes.create_string_buffer(max(array.nbytes, 1))
        if array.nbytes:
            arguments = (ctypes.c_ulonglong(array.address), ctypes.c_size_t(array.nbytes))
            self.check(self.library.cuMemcpyDtoH_v2(got, *arguments))
        return got.raw[: array.nbytes]

    def address(self, array):
        return array.address

    def device(self, array):
        return array.device

    def stream(self):
        return FakeStream(self)

    @contextlib.contextmanager
    def current(self, stream, array):
        array.__cuda_array_interface__["stream"] = stream.ptr
        yield
        del array.__cuda_array_interface__["stream"]

    def prepare(self):
        pass

    def busy(self, stream, seconds):
        with self.on(0):
            handle, microseconds = ctypes.c_void_p(stream.ptr), ctypes.c_uint64(int(seconds * 1e6))
            self.check(self.library.fake_cuda_busy(handle, microseconds))

    def fill(self, stream, array, value):
        with self.on(0):
            place = (ctypes.c_ulonglong(array.address), ctypes.c_int(value), ctypes.c_size_t(array.nbytes))
            self.check(self.library.fake_cuda_fill(ctypes.c_void_p(stream.ptr), *place))

    @contextlib.contextmanager
    def without_memory(self):
        self.set("fail_alloc", 1)
        yield
        self.set("fail_alloc", 0)

    def close(self):
        for knob in self._set:
            self.library.fake_cuda_set(knob.encode(), ctypes.c_int64(0))


class FakeFramework(Framework):
    """Arrays in the memory of the fake driver; F4 and F6 come raw, as they do with CuPy."""

    name = "cupy"

    def __init__(self):
        self.gpu = FakeGpu()

    def is_raw(self, dtype, shape):
        return dtype.startswith(("F4", "F6"))

    def empty_block(self, nbytes, device):
        memory = _Memory(self.gpu, nbytes, device)
        if memory.code:
            raise DeviceMemoryError(f"CUDA device {device}: a block of {nbytes} bytes does not fit")
        return Block(memory.address, nbytes, 0, memory, device)

    def view(self, block, offset, dtype, shape):
        nbytes = packed_nbytes(dtype, shape)
        array = FakeArray(block.address + offset, nbytes, device=block.device, owner=block.keepalive)
        array.shape = (nbytes,) if self.is_raw(dtype, shape) else shape
        return array
