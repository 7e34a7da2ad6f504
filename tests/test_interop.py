"""Arrays of every framework, on the host and (marked) on a GPU."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import BITS, noise, stored_bytes, values, write

from xds.checkpoint import load, open_checkpoint
from xds.errors import ArrayError, DeviceError, DeviceMemoryError
from xds.interop import dlpack, framework
from xds.interop.base import Places
from xds.interop.devices import gpu_count
from xds.interop.numpy_arrays import numpy_dtype

NUMPY = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "I16": np.int16, "U16": np.uint16, "F16": np.float16,
    "I32": np.int32, "U32": np.uint32, "F32": np.float32, "C64": np.complex64, "F64": np.float64, "I64": np.int64,
    "U64": np.uint64, "BF16": ml_dtypes.bfloat16, "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu, "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
}  # fmt: skip
TORCH = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "F16": "float16", "I32": "int32",
    "U32": "uint32", "F32": "float32", "C64": "complex64", "F64": "float64", "I64": "int64", "U64": "uint64",
    "BF16": "bfloat16", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F4": "float4_e2m1fn_x2",
}  # fmt: skip
SHAPES = ((), (0,), (8,), (2, 0, 4), (4, 8))
gpu = pytest.mark.skipif(gpu_count() == 0, reason="no CUDA GPU")


@pytest.fixture
def make(tmp_path):
    """Write tensors of some stored types in every shape that has whole bytes; path and content."""

    def make(dtypes):
        content = {}
        for seed, dtype in enumerate(dtypes):
            for number, shape in enumerate(SHAPES):
                if int(np.prod(shape)) * BITS[dtype] % 8 == 0:
                    content[f"{dtype}.{number}"] = (dtype, shape, values(dtype, shape, 10 * seed + number))
        return write(tmp_path / "a.safetensors", content), content

    return make


def test_numpy_types():
    assert {dtype: numpy_dtype(dtype) for dtype in BITS} == {
        dtype: np.dtype(NUMPY[dtype]) if dtype in NUMPY else None for dtype in BITS
    }


def test_importing_interop_imports_no_framework():
    code = (
        "import sys, xds.interop, xds.checkpoint\n"
        "print([name for name in ('cupy', 'torch', 'jax', 'ml_dtypes') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_framework_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    framework.cache_clear()
    with pytest.raises(ImportError, match="arrays of cupy"):
        framework("cupy")


# --- torch ---


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="torch is not installed")


def check_torch(torch, loaded, content):
    for name, (dtype, shape, data) in content.items():
        tensor = loaded[name]
        wanted = getattr(torch, TORCH.get(dtype, ""), None)
        packed = dtype == "F4" and wanted is not None
        assert stored_bytes(tensor.cpu()) == data
        assert tensor.dtype == (torch.uint8 if wanted is None else wanted)
        assert tuple(tensor.shape) == (
            (len(data),) if wanted is None else (*shape[:-1], shape[-1] // 2) if packed else shape
        )
        assert (name in loaded.raw) == (wanted is None)
        assert tensor.is_contiguous()
        assert tensor.untyped_storage().nbytes() == len(data)
        assert tensor.numel() == 0 or tensor.data_ptr() % 256 == 0


def test_torch_types(torch, make):
    path, content = make(BITS)
    check_torch(torch, load(path, device="cpu", framework="torch"), content)


def test_torch_against_the_reference(torch, make):
    reference = pytest.importorskip("safetensors.torch", reason="the safetensors package is not installed")
    path, content = make([dtype for dtype in BITS if not dtype.startswith("F6")])
    loaded = load(path, device="cpu", framework="torch")
    expected = reference.load_file(path)
    assert set(loaded) == set(expected) == set(content)
    for name, tensor in expected.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert stored_bytes(loaded[name]) == stored_bytes(tensor)


def test_torch_fp4_that_pairs_across_rows_comes_raw(torch, tmp_path):
    path = write(tmp_path / "a.safetensors", {"t": ("F4", (2, 3), b"\x21\x43\x65")})
    loaded = load(path, device="cpu", framework="torch")
    assert loaded["t"].dtype == torch.uint8
    assert loaded["t"].tolist() == [0x21, 0x43, 0x65]
    assert loaded.dtypes == {"t": "F4"}
    assert loaded.raw == {"t"}


def test_torch_tensors_are_their_own(torch, make, tmp_path):
    """Saving one writes that one; training on one works; each lives as long as it is held."""
    path, content = make(["F32"])
    loaded = load(path, device="cpu", framework="torch")
    tensor = loaded["F32.4"]
    del loaded
    gc.collect()
    torch.save(tensor, tmp_path / "t.pt")
    assert (tmp_path / "t.pt").stat().st_size < 4096
    assert stored_bytes(tensor) == content["F32.4"][2]
    tensor.zero_()
    parameter = torch.nn.Parameter(tensor)
    (parameter * 2).sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.eq(2).all()


def test_torch_streams(torch, make):
    path, content = make(BITS)
    with open_checkpoint(path) as checkpoint:
        for name, tensor in checkpoint.stream(device="cpu", framework="torch"):
            assert stored_bytes(tensor) == content[name][2]


def test_torch_makes_the_same_one_by_one(torch, make, monkeypatch):
    """By DLPack or tensor by tensor (as for types that this torch does not import): the same result."""
    found = framework("torch")
    path, content = make(BITS)
    monkeypatch.setattr(found, "_types", np.zeros_like(dlpack.TYPES))
    check_torch(torch, load(path, device="cpu", framework="torch"), content)


def test_torch_imports_most_types_at_once(torch):
    direct = {name for name, kind in zip(BITS, framework("torch")._types, strict=True) if kind}
    assert direct >= {"BOOL", "U8", "I8", "I16", "F16", "BF16", "I32", "F32", "C64", "F64", "I64"}


def test_capsules_hold_and_release_the_block(torch):
    """The memory lives as long as any tensor made of it, or any capsule that nobody took."""
    block = framework("numpy").empty_block(4096, None)
    alive = weakref.ref(block.keepalive)
    offsets = np.array([0, 256, 512], np.uint64)
    ones = np.ones(3, np.uint8)
    places = Places(offsets, ones * list(BITS).index("U8"), ones, np.zeros(3, np.uint64), np.array([100], np.uint64))
    taken, left, dropped = dlpack.capsules(block, places, dlpack.TYPES)
    del block
    tensor = torch.from_dlpack(taken)
    tensor.fill_(7)
    del dropped, left, taken
    gc.collect()
    assert alive() is not None
    assert tensor.tolist() == [7] * 100
    row = tensor[3:5]
    del tensor
    gc.collect()
    assert alive() is not None
    del row
    gc.collect()
    assert alive() is None


def test_tensors_that_die_with_the_interpreter(torch, make):
    path, _ = make(["F32", "BF16"])
    code = (
        "import sys, threading, torch, xds\n"
        f"kept = xds.load({str(path)!r}, device='cpu', framework='torch')\n"
        "torch.kept = list(kept.values())\n"
        "torch.nn.kept = torch.nn.Parameter(kept['F32.4'])\n"
        "thread = threading.Thread(target=kept.clear)\n"
        "thread.start()\n"
        "thread.join()\n"
        "print('end')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "end\n"), ended.stderr


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_a_framework_without_cuda_beside_a_gpu(make, monkeypatch, name):
    found = pytest.importorskip(name, reason=f"{name} is not installed")
    if name == "torch":
        monkeypatch.setattr(found.cuda, "is_available", lambda: False)
    else:
        monkeypatch.setattr(found, "devices", lambda kind: [])
    monkeypatch.setattr("xds.interop.devices.gpu_count", lambda: 1)
    path, _ = make(["F32"])
    assert load(path, framework=name).report.device is None
    for device in ("cuda", 0):
        with pytest.raises(DeviceError, match=f"installed {name} is built without CUDA"):
            load(path, device=device, framework=name)


# --- JAX ---


@pytest.fixture
def jax():
    return pytest.importorskip("jax", reason="JAX is not installed")


WIDE = ("F64", "I64", "U64")
NARROW = tuple(dtype for dtype in BITS if dtype not in WIDE)


def check_jax(loaded, content):
    for name, (dtype, shape, data) in content.items():
        array = loaded[name]
        assert np.asarray(array).tobytes() == data
        assert array.dtype == NUMPY.get(dtype, np.uint8)
        assert array.shape == (shape if dtype in NUMPY else (len(data),))
        assert (name in loaded.raw) == (dtype not in NUMPY)


def test_jax_types(jax, make):
    path, content = make(NARROW)
    loaded = load(path, device="cpu", framework="jax")
    assert all(isinstance(array, jax.Array) for array in loaded.values())
    check_jax(loaded, content)


@pytest.mark.parametrize("dtype", WIDE)
def test_jax_refuses_what_it_would_narrow(jax, make, dtype):
    path, content = make([dtype, "F32"])
    with pytest.raises(ArrayError, match=rf"{dtype}.*jax_enable_x64"):
        load(path, device="cpu", framework="jax")
    check_jax(
        load(path, device="cpu", framework="jax", names=lambda name: name.startswith("F32")),
        {name: tensor for name, tensor in content.items() if name.startswith("F32")},
    )


def test_jax_wide_types_where_enabled(jax, make):
    path, content = make(WIDE)
    jax.config.update("jax_enable_x64", True)
    try:
        check_jax(load(path, device="cpu", framework="jax"), content)
    finally:
        jax.config.update("jax_enable_x64", False)


def test_jax_arrays_keep_their_memory(jax, tmp_path):
    data = {f"t{number}": noise(1 << 20, number) for number in range(4)}
    path = write(tmp_path / "a.safetensors", {name: ("U8", (1 << 20,), text) for name, text in data.items()})
    kept = {}
    for _ in range(3):
        for name in data:
            kept[name] = load(path, device="cpu", framework="jax", names=[name])[name]
            gc.collect()
            np.full(1 << 22, 0xEE, np.uint8)
    assert {name: np.asarray(array).tobytes() for name, array in kept.items()} == data


# --- GPU ---


@pytest.mark.gpu
@gpu
class TestGpu:
    def test_cupy_types(self, make):
        cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
        path, content = make(BITS)
        loaded = load(path, device="cuda", framework="cupy")
        for name, (dtype, shape, data) in content.items():
            array = loaded[name]
            raw = name in loaded.raw
            assert isinstance(array, cupy.ndarray)
            assert array.dtype == (np.uint8 if raw else NUMPY[dtype])
            assert array.shape == ((len(data),) if raw else shape)
            assert cupy.asnumpy(array).tobytes() == data
            assert array.size == 0 or array.data.ptr % 256 == 0
        assert not {name for name in loaded.raw if BITS[content[name][0]] >= 16 and content[name][0] != "BF16"}

    def test_torch_types(self, torch, make):
        if not torch.cuda.is_available():
            pytest.skip("this torch has no CUDA")
        path, content = make(BITS)
        loaded = load(path, device="cuda", framework="torch")
        assert all(tensor.is_cuda for tensor in loaded.values())
        check_torch(torch, loaded, content)

    def test_jax_types(self, jax, make):
        if jax.default_backend() != "gpu":
            pytest.skip("this JAX has no CUDA")
        path, content = make(NARROW)
        loaded = load(path, device="cuda", framework="jax")
        assert all(array.device.platform == "gpu" for array in loaded.values())
        check_jax(loaded, content)

    def test_default_is_the_gpu(self, make):
        pytest.importorskip("cupy", reason="CuPy is not installed")
        path, content = make(["F32"])
        loaded = load(path)
        assert loaded.report.device is not None
        assert {name: array.__dlpack_device__()[0] for name, array in loaded.items()} == dict.fromkeys(content, 2)

    def test_out_of_memory_names_need_and_free_bytes(self, tmp_path):
        cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
        content = {f"t{number}": ("U8", (1 << 20,), noise(1 << 20, number)) for number in range(4)}
        path = write(tmp_path / "a.safetensors", content)
        pool = cupy.cuda.MemoryPool()
        pool.set_limit(size=1 << 21)
        with (
            cupy.cuda.using_allocator(pool.malloc),
            pytest.raises(DeviceMemoryError, match=rf"{4 << 20} bytes does not fit: \d+ of \d+ bytes are free.*'t0'"),
        ):
            load(path, device="cuda", framework="cupy")
        loaded = load(path, device="cuda", framework="cupy")
        assert {name: array.get().tobytes() for name, array in loaded.items()} == {n: t[2] for n, t in content.items()}
