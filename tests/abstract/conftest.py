"""The file system under fsspec's own tests, called as usual and through its coroutines."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading

import pytest
from fsspec.implementations.local import LocalFileSystem, make_path_posix

from xds.filesystem import XdsFileSystem


class Driven:
    """An asynchronous file system, each method of which runs as its coroutine on a loop of another thread.

    Only what fsspec has no coroutine for (``open`` and path arithmetic) is called directly.
    """

    def __init__(self, fs, loop):
        self._fs, self._loop = fs, loop
        self.awaited = set()

    def __getattr__(self, name):
        coroutine = getattr(self._fs, f"_{name}", None)
        if not inspect.iscoroutinefunction(coroutine):
            return getattr(self._fs, name)

        @functools.wraps(coroutine)
        def call(*args, **kwargs):
            self.awaited.add(name)
            return asyncio.run_coroutine_threadsafe(coroutine(*args, **kwargs), self._loop).result(60)

        return call


@pytest.fixture(scope="session")
def loop():
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


@pytest.fixture(params=["sync", "async"])
def made(request):
    """Make a file system with options."""
    if request.param == "sync":
        return XdsFileSystem
    loop = request.getfixturevalue("loop")
    return lambda **options: Driven(XdsFileSystem(asynchronous=True, **options), loop)


@pytest.fixture
def fs(made):
    return made(auto_mkdir=True)


@pytest.fixture
def fs_path(tmp_path):
    return str(tmp_path / "remote")


@pytest.fixture
def fs_join():
    return lambda *parts: "/".join(parts)


@pytest.fixture
def local_fs():
    return LocalFileSystem(auto_mkdir=True)


@pytest.fixture
def local_path(tmp_path):
    return make_path_posix(str(tmp_path / "local"))
