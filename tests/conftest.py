"""Fixtures that many tests share."""

from __future__ import annotations

import importlib.util
import os
import random
import tempfile
import traceback
import warnings
from pathlib import Path

import fsspec
import pytest

import xds
from xds.engine import cuda

# What Hugging Face libraries keep is not to be left in the user's folders; they look when they are imported.
os.environ.setdefault("HF_HOME", f"{tempfile.gettempdir()}/xds-tests-huggingface-{os.getuid()}")

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    """Skip what needs a GPU with CuPy, or the fake driver that test_gpu_twin gives it, and say so."""
    if os.environ.get("XDS_CUDA_LIBRARY") or (cuda.device_count()[0] and importlib.util.find_spec("cupy")):
        return
    for item in items:
        if item.path.is_relative_to(_HERE / "gpu"):
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU with CuPy; test_gpu_twin runs it on a fake driver"))


@pytest.fixture
def fs():
    """The file system of ``xds://``."""
    return fsspec.filesystem("xds")


@pytest.fixture(scope="session")
def content():
    """Three MiB and a bit of bytes that differ everywhere."""
    return random.Random(2026).randbytes((3 << 20) + 12345)


@pytest.fixture
def data_file(tmp_path, content):
    """A file that holds ``content``."""
    path = tmp_path / "data.bin"
    path.write_bytes(content)
    return str(path)


@pytest.fixture(scope="session", autouse=True)
def _threads_end():
    """Free what the reads of the whole run hold."""
    yield
    xds.close()


def _run_in_child(function) -> int:
    with warnings.catch_warnings():
        # Python 3.12 and later warn of forks beside other threads; that these work is what the tests are for.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        code = 1
        try:
            function()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture
def in_child():
    """Run a function in a forked child; gives its return code (0: it returned)."""
    return _run_in_child


@pytest.fixture
def as_nobody():
    """Run a function in a forked child as the user nobody; gives its return code (0: it returned)."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")

    def run(function) -> int:
        def child():
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            function()

        return _run_in_child(child)

    return run
