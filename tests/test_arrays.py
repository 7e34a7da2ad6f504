from __future__ import annotations

import array
import ctypes
import gc
import mmap
import sys
import types
import weakref

import ml_dtypes
import numpy as np
import pytest

from xds import arrays
from xds.arrays import destination
from xds.engine import cuda
from xds.errors import ArrayError, ForkedProcessError

CPU, CUDA, CUDA_HOST, OPENCL, MANAGED = 1, 2, 3, 4, 13


# Producers made by hand, so that what no framework here can make is refused as well.

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class FakeDLPack:
    """A DLPack producer over a bytearray; every field as told."""

    def __init__(
        self, nbytes=16, *, device=(CPU, 0), shape=(2, 2), strides=None, code=2, bits=32, lanes=1, offset=0, flags=0,
        versioned=True, version=(1, 0), null=False, error=None, name=None, tensor_device=None,
    ):  # fmt: skip
        self.memory = bytearray(nbytes + offset)
        base = 0 if null else ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.expected = base + offset
        self.device, self.versioned, self.error, self.calls = device, versioned, error, []
        self.shape = (ctypes.c_int64 * len(shape))(*shape)
        self.strides = None if strides is None else (ctypes.c_int64 * len(strides))(*strides)
        managed = arrays._DLManagedTensorVersioned() if versioned else arrays._DLManagedTensor()
        tensor = managed.tensor
        tensor.data = base
        tensor.device_type, tensor.device_id = tensor_device or device
        tensor.ndim = len(shape)
        tensor.code, tensor.bits, tensor.lanes = code, bits, lanes
        tensor.shape = ctypes.cast(self.shape, ctypes.POINTER(ctypes.c_int64))
        if self.strides is not None:
            tensor.strides = ctypes.cast(self.strides, ctypes.POINTER(ctypes.c_int64))
        tensor.byte_offset = offset
        if versioned:
            managed.major, managed.minor = version
            managed.flags = flags
        self.managed = managed
        self.name = name or (b"dltensor_versioned" if versioned else b"dltensor")

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **arguments):
        self.calls.append(arguments)
        if not self.versioned and "max_version" in arguments:
            raise TypeError("unexpected keyword argument 'max_version'")
        if self.error is not None:
            raise self.error
        return _new_capsule(ctypes.addressof(self.managed), self.name, None)


class FakeCuda:
    """A producer of the CUDA array interface."""

    def __init__(self, **changes):
        self.__cuda_array_interface__ = {
            "shape": (4, 2),
            "typestr": "<f4",
            "data": (0x1000, False),
            "version": 3,
            "strides": None,
            "stream": None,
            **changes,
        }


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("strides", [None, (2, 1)])
def test_dlpack_host(versioned, strides):
    fake = FakeDLPack(versioned=versioned, strides=strides, offset=4)
    target = destination(fake)
    assert (target.address, target.nbytes, target.device, target.stream) == (fake.expected, 16, None, None)
    assert fake.calls[0] == {"max_version": (1, 0)}
    assert len(fake.calls) == (1 if versioned else 2)


def test_dlpack_pinned_host_memory_is_host_memory():
    target = destination(FakeDLPack(device=(CUDA_HOST, 0)), stream=7)
    assert (target.device, target.stream) == (None, None)


def test_dlpack_cuda_says_device_and_stream():
    fake = FakeDLPack(device=(CUDA, 3))
    target = destination(fake)
    assert (target.address, target.nbytes, target.device, target.stream) == (fake.expected, 16, 3, 0)
    assert fake.calls == [{"stream": -1, "max_version": (1, 0)}]
    assert destination(fake, stream=5).stream == 5
    fake.__cuda_array_interface__ = {"stream": 2}
    assert destination(fake).stream == 2
    assert destination(fake, stream=5).stream == 5


@pytest.mark.parametrize(
    ("arguments", "nbytes"),
    [
        ({"bits": 16, "code": 4}, 8),
        ({"bits": 8, "code": 10}, 4),
        ({"bits": 32, "lanes": 4}, 64),
        ({"bits": 4, "shape": (3,)}, 2),
        ({"bits": 4, "shape": (3,), "flags": 4}, 3),
        ({"shape": ()}, 4),
        ({"shape": (0, 5)}, 0),
        ({"shape": (0, 5), "null": True}, 0),
        ({"shape": (1, 4), "strides": (999, 1)}, 16),
        ({"shape": (0, 4), "strides": (1, 999)}, 0),
    ],
)
def test_dlpack_sizes(arguments, nbytes):
    assert destination(FakeDLPack(nbytes=64, **arguments)).nbytes == nbytes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"device": (MANAGED, 0)}, "managed"),
        ({"device": (CUDA, 0), "tensor_device": (MANAGED, 0)}, "managed"),
        ({"device": (OPENCL, 0)}, "DLPack type 4"),
        ({"flags": 1}, "read-only"),
        ({"flags": 2}, "copy"),
        ({"version": (2, 0)}, r"DLPack 2\.0"),
        ({"strides": (1, 2)}, "not C-contiguous"),
        ({"strides": (-2, 1)}, "not C-contiguous"),
        ({"strides": (0, 1)}, "not C-contiguous"),
        ({"null": True}, "null"),
        ({"error": BufferError("not exportable")}, "not exportable"),
        ({"error": TypeError("bad dtype")}, "bad dtype"),
        ({"name": b"used_dltensor"}, "no DLPack capsule"),
    ],
)
def test_dlpack_refusals(arguments, words):
    with pytest.raises(ArrayError, match=words):
        destination(FakeDLPack(**arguments))


def test_a_dlpack_destination_keeps_its_producer_alive():
    fake = FakeDLPack()
    gone = weakref.ref(fake)
    target = destination(fake)
    del fake
    gc.collect()
    assert gone() is not None
    del target
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mask": object()}, "mask"),
        ({"data": (0x1000, True)}, "read-only"),
        ({"strides": (4, 16)}, "not C-contiguous"),
        ({"strides": (16, 4)}, "not C-contiguous"),
        ({"strides": (-8, 4)}, "not C-contiguous"),
        ({"typestr": "|O"}, "no size in bytes"),
        ({"typestr": "|V0"}, "no size in bytes"),
        ({"typestr": "nonsense"}, "unknown"),
        ({"data": (0, False)}, "null"),
    ],
)
def test_cuda_array_interface_refusals(changes, words):
    with pytest.raises(ArrayError, match=words):
        destination(FakeCuda(**changes))


def test_cuda_array_interface_of_no_bytes_needs_no_driver():
    target = destination(FakeCuda(shape=(0, 3), data=(0, False)))
    assert (target.address, target.nbytes) == (0, 0)


def knows(monkeypatch, found, count=2, reason=""):
    """A CUDA driver that knows one pointer."""

    def pointer(address):
        assert address == 0x1000
        return found

    monkeypatch.setattr(cuda, "pointer", pointer)
    monkeypatch.setattr(cuda, "device_count", lambda: (count, reason))


@pytest.mark.parametrize("strides", [None, (8, 4)])
def test_cuda_array_interface_asks_the_driver_for_the_device(monkeypatch, strides):
    knows(monkeypatch, cuda.Pointer(1, False))
    target = destination(FakeCuda(strides=strides))
    assert (target.address, target.nbytes, target.device, target.stream) == (0x1000, 32, 1, 0)
    assert destination(FakeCuda(stream=1)).stream == 1
    assert destination(FakeCuda(stream=1), stream=9).stream == 9
    assert destination(FakeCuda(typestr="|V2")).nbytes == 16


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (cuda.Pointer(0, True), "managed"),
        (cuda.Pointer(None, False), "not device memory"),
        (None, "does not know its pointer 0x1000"),
    ],
)
def test_cuda_array_interface_with_a_pointer_that_does_not_do(monkeypatch, found, words):
    knows(monkeypatch, found)
    with pytest.raises(ArrayError, match=words):
        destination(FakeCuda())


def test_cuda_array_interface_without_a_driver(monkeypatch):
    knows(monkeypatch, None, 0, "libcuda.so.1: not found")
    with pytest.raises(ArrayError, match=r"no usable CUDA driver \(libcuda.so.1: not found\)"):
        destination(FakeCuda())


def test_what_a_framework_says_after_a_fork_is_said_in_our_words(monkeypatch):
    class Forked:
        def __dlpack_device__(self):
            raise RuntimeError("cudaErrorInitializationError")

        def __dlpack__(self):
            raise AssertionError

    with pytest.raises(RuntimeError, match="cudaErrorInitializationError"):
        destination(Forked())  # no fork: its own words
    monkeypatch.setattr(cuda._Use, "inherited", True)
    with pytest.raises(ForkedProcessError, match="spawn or forkserver"):
        destination(Forked())


@pytest.mark.parametrize("module", ["jax", "jaxlib._jax", "jaxlib.xla_extension", "tensorflow.python.framework.ops"])
def test_immutable_frameworks_are_refused_by_name(module):
    kind = type("ArrayImpl", (FakeDLPack,), {"__module__": module})
    with pytest.raises(ArrayError, match="immutable"):
        destination(kind())


@pytest.mark.parametrize(
    "dtype", ["u1", "<f8", ">i4", "c16", "S7", "M8[ns]", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]
)
def test_numpy(dtype):
    values = np.zeros((3, 4), dtype)
    target = destination(values)
    assert (target.address, target.nbytes, target.device, target.stream) == (
        values.ctypes.data,
        values.nbytes,
        None,
        None,
    )
    assert destination(values, stream=12).stream is None


def test_numpy_views_and_odd_shapes():
    base = np.zeros((4, 6), np.uint16)
    assert destination(base[2]).address == base.ctypes.data + 24
    assert destination(base[:0]).nbytes == 0
    assert destination(np.zeros((), np.float32)).nbytes == 4
    assert destination(np.zeros((1, 5, 1))[:, :, ::-1]).nbytes == 40
    assert destination(np.zeros(3, [("a", "u1"), ("b", "<f8")])).nbytes == 27


def test_numpy_refusals():
    read_only = np.zeros(3)
    read_only.flags.writeable = False
    for values, words in (
        (np.zeros((4, 4))[:, ::2], "not C-contiguous"),
        (np.zeros((4, 4)).T, "not C-contiguous"),
        (np.zeros(4)[::-1], "not C-contiguous"),
        (np.broadcast_to(np.zeros(1), (4,)), "not C-contiguous"),
        (np.asfortranarray(np.zeros((4, 4))), "not C-contiguous"),
        (read_only, "read-only"),
        (np.frombuffer(b"abcd", np.uint8), "read-only"),
        (np.zeros(3, object), "Python objects"),
        (np.zeros(3, [("a", object)]), "Python objects"),
    ):
        with pytest.raises(ArrayError, match=words):
            destination(values)


def test_numpy_memmap(tmp_path):
    values = np.memmap(tmp_path / "a", np.uint8, "w+", shape=100)
    assert destination(values).nbytes == 100
    with pytest.raises(ArrayError, match="read-only"):
        destination(np.memmap(tmp_path / "a", np.uint8, "r"))


def test_buffers():
    for buffer, nbytes in (
        (bytearray(5), 5),
        (memoryview(bytearray(8)).cast("I"), 8),
        (memoryview(bytearray(8))[2:4], 2),
        (array.array("d", [0.0] * 3), 24),
        ((ctypes.c_int32 * 4)(), 16),
        (mmap.mmap(-1, 4096), 4096),
        (bytearray(), 0),
        (memoryview(bytearray()), 0),
    ):
        target = destination(buffer)
        assert target.nbytes == nbytes
        assert target.device is None
        assert (target.address == 0) is (nbytes == 0)


def test_a_bytearray_cannot_be_resized_under_a_read():
    buffer = bytearray(100)
    target = destination(buffer)
    with pytest.raises(BufferError):
        buffer.extend(b"x" * 1000)
    del target
    buffer.extend(b"x")


def test_buffer_refusals():
    for buffer, words in (
        (b"bytes", "read-only"),
        (memoryview(b"bytes"), "read-only"),
        (memoryview(bytearray(8))[::2], "not C-contiguous"),
        ("text", "neither DLPack"),
        (None, "neither DLPack"),
        (12, "neither DLPack"),
        ([1, 2], "neither DLPack"),
        (memoryview(np.zeros(2, object)), "Python objects"),
    ):
        with pytest.raises(ArrayError, match=words):
            destination(buffer)


def test_array_error_is_a_type_error_and_an_os_error():
    with pytest.raises(TypeError):
        destination(None)
    with pytest.raises(OSError, match="neither"):
        destination(None)


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (0, 0),
        (2, 2),
        (np.int64(7), 7),
        (types.SimpleNamespace(ptr=11), 11),
        (types.SimpleNamespace(cuda_stream=12), 12),
        (types.SimpleNamespace(handle=ctypes.c_void_p(13)), 13),
        (types.SimpleNamespace(handle=ctypes.c_void_p(0)), 0),
        (types.SimpleNamespace(__cuda_stream__=lambda: (0, 14)), 14),
    ],
)
def test_stream_handles(stream, handle):
    assert arrays.stream_handle(stream) == handle


@pytest.mark.parametrize("stream", [-1, True, "0", 1.0, object()])
def test_what_is_no_stream(stream):
    with pytest.raises(ValueError, match="no CUDA stream"):
        arrays.stream_handle(stream)


def test_cupy_arrays_take_cupys_current_stream(monkeypatch):
    class CupyArray(FakeDLPack):
        pass

    asked = []

    def current(device):
        asked.append(device)
        return types.SimpleNamespace(ptr=77)

    cupy = types.SimpleNamespace(ndarray=CupyArray, cuda=types.SimpleNamespace(get_current_stream=current))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    fake = CupyArray(device=(CUDA, 2))
    assert destination(fake).stream == 77
    assert asked == [2]
    assert destination(fake, stream=3).stream == 3
    assert destination(FakeDLPack(device=(CUDA, 2))).stream == 0


class TestTorch:
    @pytest.fixture
    def torch(self):
        return pytest.importorskip("torch", reason="torch is not installed")

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "bool", "complex64", "uint16"])
    def test_tensors(self, torch, dtype):
        tensor = torch.empty((3, 4), dtype=getattr(torch, dtype))
        target = destination(tensor)
        assert (target.address, target.nbytes) == (tensor.data_ptr(), 12 * tensor.element_size())
        assert (target.device, target.stream) == (None, None)
        assert destination(tensor[1]).address == tensor.data_ptr() + 4 * tensor.element_size()

    def test_parameters_and_empty_tensors(self, torch):
        assert destination(torch.nn.Parameter(torch.zeros(4))).nbytes == 16
        assert destination(torch.empty(0, 3)).nbytes == 0
        assert destination(torch.zeros(())).nbytes == 4

    def test_refusals(self, torch):
        for tensor, words in (
            (torch.zeros(4, 4).T, "not C-contiguous"),
            (torch.zeros(1).expand(4), "not C-contiguous"),
            (torch.zeros(4, device="meta"), "device 'meta'"),
            (torch.zeros(4, 4).to_sparse(), "layout"),
            (torch.zeros(4, dtype=torch.complex64).conj(), "conjugated"),
        ):
            with pytest.raises(ArrayError, match=words):
                destination(tensor)
