"""One set of tests for two GPUs: the real one, or the fake driver where ``XDS_CUDA_LIBRARY`` names it."""

from __future__ import annotations

import gc
import os
import time

import pytest
from fake_gpu import FakeGpu, RealGpu

import xds
import xds.interop
from xds.engine import mover


@pytest.fixture(scope="session")
def _gpu():
    return FakeGpu() if os.environ.get("XDS_CUDA_LIBRARY") else RealGpu()


@pytest.fixture
def gpu(_gpu):
    """The GPU; afterwards all that XDS held of it is free, and on the fake one nothing was done that one may not do."""
    _gpu.prepare()
    yield _gpu
    _gpu.close()
    gc.collect()
    deadline = time.monotonic() + 30
    while mover._PROCESS.held:
        assert time.monotonic() < deadline, "transfers that do not come to rest"
        mover._PROCESS.sweep()
        time.sleep(0.001)
    xds.close()
    assert mover.pinned_nbytes() == 0
    if not _gpu.real:
        counters = ("registered_nbytes", "events", "unpinned_copies", "streams_destroyed_busy")
        assert {name: _gpu.get(name) for name in counters} == dict.fromkeys(counters, 0)


@pytest.fixture
def fake(gpu):
    """The fake GPU, for what a real one does not do when told."""
    if gpu.real:
        pytest.skip("the real driver does not fail on demand")
    return gpu


@pytest.fixture
def two(gpu):
    """A GPU beside another."""
    if gpu.devices < 2:
        pytest.skip("needs two GPUs")
    return gpu


@pytest.fixture
def loads(gpu, monkeypatch):
    """``xds.load`` into the GPU, with a framework for the fake one."""
    if not gpu.real:
        monkeypatch.setitem(xds.interop._CLASSES, "cupy", "fake_gpu:FakeFramework")
        xds.interop.framework.cache_clear()
    yield lambda url, **options: xds.load(url, **{"device": "cuda", "framework": "cupy", **options})
    xds.interop.framework.cache_clear()


@pytest.fixture
def sized(monkeypatch):
    """Set the mover's environment variables: the next read makes a mover of that size."""

    def change(**variables):
        mover.close()
        for name, value in variables.items():
            monkeypatch.setenv(f"XDS_MOVER_{name.upper()}", str(value))

    yield change
    mover.close()
