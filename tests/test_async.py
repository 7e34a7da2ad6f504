"""The coroutines: they never block their loop, and what is cancelled has ended when they have."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading

import pytest
from fsspec.asyn import AsyncFileSystem

import xds
from xds.errors import FileChangedError
from xds.filesystem import XdsFileSystem
from xds.interrupt import checkpoint, in_thread

# A gate opens after this many turns of the loop; a loop that is blocked never turns.
TICKS = 25


class Gated:
    """A backend whose every call waits at a gate."""

    def __init__(self, real, gate):
        self._real, self._gate = real, gate

    def __getattr__(self, name):
        found = getattr(self._real, name)

        def call(*args, **kwargs):
            assert self._gate.wait(30), "the loop stood still while the backend was slow"
            return found(*args, **kwargs)

        return call


def run_behind_a_gate(action):
    """Run a coroutine on a file system that does not answer before the loop has turned often."""

    async def main():
        gate = threading.Event()
        fs = XdsFileSystem(asynchronous=True, skip_instance_cache=True)
        fs.backend = Gated(XdsFileSystem().backend, gate)

        async def heartbeat():
            for _ in range(TICKS):
                await asyncio.sleep(0.001)
            gate.set()

        beating = asyncio.ensure_future(heartbeat())
        result = await action(fs)
        assert gate.is_set(), "the backend was never asked"
        await beating
        return result

    return asyncio.run(main())


CALLS = {
    "_info": "{f}", "_ls": "{d}", "_exists": "{f}", "_isfile": "{f}", "_isdir": "{d}", "_size": "{f}", "_find": "{d}",
    "_glob": "{d}/*", "_du": "{d}", "_expand_path": "{d}/*", "_cat_file": "{f}", "_cat": "{f}", "_rm_file": "{f}",
    "_mkdir": "{d}/new", "_makedirs": "{d}/new", "_rmdir": "{d}/empty", "_touch": "{d}/new", "_rm": "{f}",
    "_sizes": ["{f}"],
    "_get_file": ("{f}", "{d}/got"), "_get": ("{f}", "{d}/got"), "_put_file": ("{f}", "{d}/put"),
    "_put": ("{f}", "{d}/put"), "_pipe_file": ("{d}/new", b"x"), "_pipe": ("{d}/new", b"x"),
    "_cp_file": ("{f}", "{d}/copy"), "_copy": ("{f}", "{d}/copy"), "_mv": ("{f}", "{d}/moved"),
    "_mv_file": ("{f}", "{d}/moved"), "_cat_ranges": (["{f}"] * 2, [0, 1], [5, None]),
}  # fmt: skip


def filled(value, names):
    if isinstance(value, str):
        return value.format(**names)
    if isinstance(value, (list, tuple)):
        return type(value)(filled(one, names) for one in value)
    return value


@pytest.mark.parametrize("name", CALLS)
def test_no_coroutine_blocks_the_loop(name, data_file, tmp_path):
    (tmp_path / "empty").mkdir()
    arguments = filled(CALLS[name], {"f": data_file, "d": str(tmp_path)})
    arguments = arguments if isinstance(arguments, tuple) else (arguments,)
    run_behind_a_gate(lambda fs: getattr(fs, name)(*arguments))


def test_walk_does_not_block_the_loop(tmp_path, data_file):
    async def walk(fs):
        return [step async for step in fs._walk(str(tmp_path))]

    assert run_behind_a_gate(walk) == [(str(tmp_path), [], ["data.bin"])]


def test_every_coroutine_is_tried():
    ours = {
        name
        for name in dir(XdsFileSystem)
        if inspect.iscoroutinefunction(getattr(XdsFileSystem, name)) and name.startswith("_")
    }
    # fsspec's helper for ranges of HTTP, of no use here.
    assert ours - set(CALLS) == {"_process_limits"}
    for name in ours & set(dir(AsyncFileSystem)) - {"_process_limits"}:
        assert getattr(XdsFileSystem, name) is not getattr(AsyncFileSystem, name), f"{name} is fsspec's own"


def test_many_reads_on_one_loop(data_file, content):
    async def main():
        fs = XdsFileSystem(asynchronous=True)
        ticks, over = 0, asyncio.Event()

        async def heartbeat():
            nonlocal ticks
            while not over.is_set():
                ticks += 1
                await asyncio.sleep(0)

        beating = asyncio.ensure_future(heartbeat())
        wide = [fs._cat_file(data_file, number, None) for number in range(40)]
        small = [fs._cat_file(data_file, number, number + 100) for number in range(40)]
        many = [fs._cat_ranges([data_file] * 3, [number, 0, -5], [number + 9, None, None]) for number in range(20)]
        results = await asyncio.gather(*wide, *small, *many)
        over.set()
        await beating
        assert results[:40] == [content[number:] for number in range(40)]
        assert results[40:80] == [content[number : number + 100] for number in range(40)]
        assert results[80:] == [[content[number : number + 9], content, content[-5:]] for number in range(20)]
        assert ticks > TICKS

    asyncio.run(main())


def test_cat_ranges_on_error(data_file, content, tmp_path):
    async def main():
        fs = XdsFileSystem(asynchronous=True)
        missing = str(tmp_path / "no")
        for end in (10, None):
            found = await fs._cat_ranges([data_file, missing, data_file], [0, 0, 5], end)
            assert found[0] == content[:end]
            assert isinstance(found[1], FileNotFoundError)
            assert found[2] == content[5:end]
            with pytest.raises(FileNotFoundError):
                await fs._cat_ranges([data_file, missing], 0, end, on_error="raise")
        with pytest.raises(ValueError, match="on_error"):
            await fs._cat_ranges([data_file], 0, 1, on_error="omit")
        found = await fs._cat([data_file, missing], on_error="return")
        assert found[data_file] == content
        assert isinstance(found[missing], FileNotFoundError)
        assert list(await fs._cat([data_file, missing], on_error="omit")) == [data_file]
        with pytest.raises(FileNotFoundError):
            await fs._cat([data_file, missing])

    asyncio.run(main())


@pytest.mark.parametrize("nbytes", [1000, 2 << 20])
def test_a_file_that_changes_under_a_coroutine(data_file, nbytes):
    async def main():
        fs = XdsFileSystem(asynchronous=True, skip_instance_cache=True)
        real = XdsFileSystem().backend

        class Backend:
            def __getattr__(self, name):
                return getattr(real, name)

            def open(self, path):
                handle = real.open(path)
                os.truncate(path, handle.nbytes // 2)
                return handle

        fs.backend = Backend()
        size = os.stat(data_file).st_size  # noqa: PTH116 (text)
        with pytest.raises(FileChangedError):
            await fs._cat_file(data_file, size - nbytes, None)
        with open(data_file, "ab") as file:
            file.truncate(size)
        found = await fs._cat_ranges([data_file] * 2, [size - nbytes, 0], None)
        assert all(isinstance(one, FileChangedError) for one in found)

    asyncio.run(main())


def open_descriptors(path):
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))  # noqa: PTH115 (text)
        except FileNotFoundError:
            continue
    return found.count(str(path))


@pytest.mark.parametrize("many", [False, True])
def test_what_is_cancelled_has_ended(tmp_path, many):
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(256 << 20)

    async def main():
        fs = XdsFileSystem(asynchronous=True, skip_instance_cache=True)
        real, transfers, begun = XdsFileSystem().backend, [], asyncio.Event()
        loop = asyncio.get_running_loop()

        class Backend:
            def __getattr__(self, name):
                return getattr(real, name)

            def transfer(self, *args, **kwargs):
                transfers.append(real.transfer(*args, **kwargs))
                loop.call_soon_threadsafe(begun.set)
                return transfers[-1]

        fs.backend = Backend()
        coroutine = fs._cat_ranges([str(path)] * 2, 0, None) if many else fs._cat_file(str(path))
        task = asyncio.ensure_future(coroutine)
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task, coroutine
        assert len(transfers) == 1
        assert transfers[0].done()
        transfers.clear()

    asyncio.run(main())
    assert open_descriptors(path) == 0


def test_a_cancelled_copy_ends_at_its_next_piece():
    steps, go_on, begun = [], threading.Event(), threading.Event()

    def work():
        begun.set()
        assert go_on.wait(30)
        for number in range(1000):
            checkpoint()
            steps.append(number)

    async def main():
        task = asyncio.ensure_future(in_thread(work))
        await asyncio.to_thread(begun.wait, 30)
        task.cancel()
        await asyncio.sleep(0.01)
        task.cancel()  # who cancels twice still waits for the end
        await asyncio.sleep(0.01)
        assert not task.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert steps == []

    asyncio.run(main())


def test_what_never_began_does_nothing():
    done = []

    async def main():
        loop = asyncio.get_running_loop()
        gate = threading.Event()
        # All threads of the loop are busy, so the work waits for one.
        busy = [loop.run_in_executor(None, gate.wait, 30) for _ in range(64)]
        task = asyncio.ensure_future(in_thread(done.append, 1))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.sleep(0.01)
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.gather(*busy)

    asyncio.run(main())
    assert done == []


def test_reads_of_coroutines_are_traced_and_counted(data_file, content):
    events = []

    async def main():
        fs = XdsFileSystem(asynchronous=True)
        await fs._cat_file(data_file)
        await fs._cat_ranges([data_file] * 2, 0, None)
        await fs._cat_file(data_file, 0, 5)

    with xds.collect() as reports, xds.trace(events.append):
        asyncio.run(main())
    assert [report.nbytes for report in reports] == [len(content), 2 * len(content), 5]
    assert [event.nbytes for event in events if isinstance(event, xds.Complete) and event.name == "read"] == [
        len(content), 2 * len(content), 5,
    ]  # fmt: skip
