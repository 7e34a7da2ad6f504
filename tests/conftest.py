"""Fixtures that many tests share."""

from __future__ import annotations

import os
import random

import fsspec
import pytest

import xds


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


@pytest.fixture
def as_nobody():
    """Run a function in a forked child as the user nobody; gives its return code (0: it returned)."""

    def run(function) -> int:
        if os.geteuid() != 0:
            pytest.skip("needs root, to become another user")
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
                function()
                code = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    return run
