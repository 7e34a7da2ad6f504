"""Checkpoints into GPU memory: every type, alignment, shards, streams, no memory, interruptions, forks."""

from __future__ import annotations

import numpy as np
import pytest
from checkpoint_files import BITS, noise, stored_bytes, values, write, write_index
from fake_gpu import FRESH

import xds
from xds.errors import DeviceError, DeviceMemoryError, ForkedProcessError, RequirementError

pytestmark = pytest.mark.gpu


def checked(gpu, loaded, tensors, device=0):
    assert set(loaded) == set(tensors)
    for name, (dtype, shape, data) in tensors.items():
        array = loaded[name]
        assert gpu.tohost(array) == data, name
        assert loaded.dtypes[name] == dtype
        if name not in loaded.raw:
            assert tuple(array.shape) == shape
        if data:
            assert gpu.address(array) % 256 == 0
            assert gpu.device(array) == device
    assert sum(loaded.report.placement.values()) == loaded.report.nbytes
    assert loaded.report.nbytes == sum(len(data) for _, _, data in tensors.values())
    assert set(loaded.report.placement) == {"copy"}
    assert set(loaded.report.posting) == {"host"}
    assert loaded.report.device == device


def test_every_type(gpu, loads, tmp_path):
    tensors = {}
    for number, dtype in enumerate(BITS):
        for shape in ((4, 8), (0, 4), (16,), (1, 2, 4)):
            tensors[f"{dtype}.{shape}"] = (dtype, shape, values(dtype, shape, number))
        if BITS[dtype] % 8 == 0:
            tensors[f"{dtype}.scalar"] = (dtype, (), values(dtype, (), number))
    checked(gpu, loads(write(tmp_path / "model.safetensors", tensors)), tensors)


def test_odd_sizes_and_the_padding_between_them(gpu, loads, tmp_path):
    sizes = [1, 3, 255, 256, 257, 511, 512, 513, 4095, 4096, 4097, 70001, 0, 2]
    tensors = {f"t{n}": ("U8", (size,), noise(size, n)) for n, size in enumerate(sizes * 8)}
    checked(gpu, loads(write(tmp_path / "model.safetensors", tensors)), tensors)


def test_three_thousand_tiny_tensors(gpu, loads, tmp_path):
    tensors = {f"layer.{n}": ("F32", (n % 7, 3), noise(n % 7 * 12, n)) for n in range(3000)}
    path = write(tmp_path / "model.safetensors", tensors)
    checked(gpu, loads(path), tensors)
    some = {name: tensors[name] for name in list(tensors)[::11]}
    checked(gpu, loads(path, names=list(some)), some)


def test_shards(gpu, loads, tmp_path):
    everything, weight_map = {}, {}
    for shard in range(4):
        tensors = {f"s{shard}.{n}": ("BF16", (n, 33), noise(n * 66, shard * 50 + n)) for n in range(20)}
        file = f"model-{shard}.safetensors"
        write(tmp_path / file, tensors)
        weight_map.update(dict.fromkeys(tensors, file))
        everything.update(tensors)
    write_index(tmp_path, weight_map)
    checked(gpu, loads(f"xds://{tmp_path}"), everything)


def test_tensors_larger_than_a_block_and_a_chunk(gpu, loads, tmp_path):
    tensors = {
        "small": ("U8", (5,), noise(5)),
        "large": ("U8", (130 << 20,), noise(1 << 20, 1) * 130),
        "last": ("F16", (3, 3), noise(18, 2)),
    }
    checked(gpu, loads(write(tmp_path / "model.safetensors", tensors)), tensors)


def test_one_by_one_in_the_order_of_readiness(gpu, loads, tmp_path):
    tensors = {f"t{n}": ("U8", (n * 1000,), noise(n * 1000, n)) for n in range(40)}
    path = write(tmp_path / "model.safetensors", tensors)
    with xds.open_checkpoint(path) as checkpoint:
        got = dict(checkpoint.stream(device="cuda", framework="cupy"))
        assert set(got) == set(tensors)
        assert all(gpu.tohost(got[name]) == data for name, (_, _, data) in tensors.items())
        one = checkpoint.get("t7", device="cuda", framework="cupy")
        assert gpu.tohost(one) == tensors["t7"][2]
        for name, array in checkpoint.stream(device="cuda", framework="cupy"):
            assert gpu.tohost(array) == tensors[name][2]
            break  # the rest is not read


def test_progress_ends_at_the_whole(gpu, loads, tmp_path):
    tensors = {f"t{n}": ("U8", (50_000,), noise(50_000, n)) for n in range(9)}
    seen = []
    path = write(tmp_path / "model.safetensors", tensors)
    checked(gpu, loads(path, progress=lambda done, total: seen.append((done, total))), tensors)
    assert seen[0] == (0, 450_000)
    assert seen[-1] == (450_000, 450_000)
    assert seen == sorted(seen)


def test_the_second_device(two, loads, tmp_path):
    tensors = {"a": ("F32", (100,), noise(400)), "b": ("I8", (3,), noise(3, 1))}
    path = write(tmp_path / "model.safetensors", tensors)
    checked(two, loads(path, device="cuda:1"), tensors, device=1)
    checked(two, loads(path, device=1), tensors, device=1)


def test_devices_and_requirements_that_cannot_be(gpu, loads, tmp_path):
    path = write(tmp_path / "model.safetensors", {"a": ("U8", (3,), b"abc")})
    with pytest.raises(DeviceError, match=f"shows {gpu.devices} CUDA devices"):
        loads(path, device="cuda:99")
    for require in ({"posting": "gpu"}, {"placement": "dma"}, {"placement": "mapped"}):
        with pytest.raises(RequirementError):
            loads(path, require=require)
    loaded = loads(path, require={"posting": "host", "placement": "copy"})
    assert gpu.tohost(loaded["a"]) == b"abc"


def test_no_memory_names_the_need_and_the_tensors(gpu, loads, tmp_path):
    tensors = {"first": ("F32", (100_000,), noise(400_000)), "second": ("F32", (50,), noise(200, 1))}
    path = write(tmp_path / "model.safetensors", tensors)
    with gpu.without_memory(), pytest.raises(DeviceMemoryError) as caught:
        loads(path)
    assert isinstance(caught.value, MemoryError)
    for words in ("CUDA device 0", "a block of 400", "tensors 'first' to 'second'", "needs 400200 bytes in all"):
        assert words in str(caught.value)
    checked(gpu, loads(path), tensors)


def test_an_interrupted_load(gpu, loads, tmp_path):
    tensors = {f"t{n}": ("U8", (1 << 20,), noise(1 << 20, n)) for n in range(20)}
    path = write(tmp_path / "model.safetensors", tensors)

    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loads(path, progress=interrupt)
    checked(gpu, loads(path), tensors)


def test_a_child_loads_into_host_memory_alone(gpu, loads, tmp_path, in_child):
    data = noise(40_000)
    path = write(tmp_path / "model.safetensors", {"a": ("F32", (100, 100), data)})
    assert gpu.tohost(loads(path)["a"]) == data

    def child():
        loaded = xds.load(path, device="cpu")
        assert stored_bytes(loaded["a"]) == data
        assert isinstance(xds.load(path)["a"], np.ndarray)  # no GPU that could be used here
        with pytest.raises(ForkedProcessError, match="spawn or forkserver"):
            loads(path)

    assert in_child(child) == 0
    assert gpu.tohost(loads(path)["a"]) == data


def test_new_memory_would_show(gpu):
    # What the tests above lean on: bytes that nobody wrote are told from bytes that were read.
    assert gpu.tohost(gpu.empty(300)) == bytes([FRESH]) * 300
