"""Collected reports, trace events, NVTX ranges: who hears of what, and that listening breaks nothing."""

from __future__ import annotations

import gc
import io
import json
import logging
import os
import struct
import subprocess
import sys
import threading

import fsspec
import numpy as np
import pytest

import xds
from xds import observe
from xds.observe import TRACE
from xds.report import TOTALS


@pytest.fixture(autouse=True)
def _nobody_listens():
    assert TRACE.callbacks == ()
    assert TOTALS._collecting == ()
    yield
    assert TRACE.callbacks == ()
    assert TOTALS._collecting == ()


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.safetensors"
    values = np.arange(5000, dtype=np.float32)
    header = json.dumps(
        {
            "a": {"dtype": "F32", "shape": [1000], "data_offsets": [0, 4000]},
            "b": {"dtype": "F32", "shape": [4000], "data_offsets": [4000, 20000]},
        }
    ).encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(struct.pack("<Q", len(header)) + header + values.tobytes())
    return str(path)


# Collected reports.


def test_collect_gives_every_report_of_the_block(fs, data_file, content):
    with xds.collect() as reports:
        fs.cat_file(data_file, 0, 100)
        fs.cat_file(data_file)
        array = np.empty(2 << 20, np.uint8)
        fs.readinto_ranges([data_file], [0], [2 << 20], [array])
    fs.cat_file(data_file, 0, 7)
    assert [report.nbytes for report in reports] == [100, len(content), 2 << 20]
    assert reports.nbytes == 100 + len(content) + (2 << 20)
    assert reports.errors == 0
    assert all(isinstance(report, xds.ReadReport) for report in reports)


def test_collect_sees_reads_made_inside_other_libraries(data_file):
    with xds.collect() as reports, fsspec.open(f"xds://{data_file}", "rb") as file:
        array = np.frombuffer(io.BufferedReader(file).read(1000), np.uint8)
    assert reports.nbytes >= len(array) == 1000


def test_collect_sees_other_threads_and_blocks_nest(fs, data_file):
    with xds.collect() as outer:
        with xds.collect() as inner:
            threads = [threading.Thread(target=fs.cat_file, args=(data_file, 0, 10)) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        fs.cat_file(data_file, 0, 5)
    assert [report.nbytes for report in inner] == [10] * 8
    assert [report.nbytes for report in outer] == [10] * 8 + [5]


def test_blocks_that_overlap_end_in_any_order(fs, data_file):
    first, second = xds.collect(), xds.collect()
    one, two = first.__enter__(), second.__enter__()
    assert one == two == []  # equal, and yet each its own
    fs.cat_file(data_file, 0, 1)
    first.__exit__(None, None, None)
    fs.cat_file(data_file, 0, 2)
    second.__exit__(None, None, None)
    assert [report.nbytes for report in one] == [1]
    assert [report.nbytes for report in two] == [1, 2]


def test_collect_counts_failures_and_ends_with_the_block(fs, tmp_path):
    path = tmp_path / "shrinks"
    path.write_bytes(bytes(1000))
    with fs.open(str(path), "rb") as file:
        os.truncate(path, 10)
        with pytest.raises(OSError, match="shrinks"), xds.collect() as reports:
            file.read()
    assert reports == []
    assert reports.errors == 1


def test_a_load_is_collected(model):
    with xds.collect() as reports:
        result = xds.load(f"xds://{model}", device="cpu", framework="numpy")
    assert result.report in reports


def test_a_forked_child_collects_for_itself(fs, data_file, in_child):
    begun, end = threading.Event(), threading.Event()

    def other():
        with xds.collect():
            begun.set()
            end.wait()

    thread = threading.Thread(target=other)
    thread.start()
    begun.wait()
    try:
        with xds.collect() as reports:
            fs.cat_file(data_file, 0, 3)

            def child():
                fs.cat_file(data_file, 0, 4)
                assert [report.nbytes for report in reports] == [3, 4]
                # Nobody would ever read what a thread of the parent collects.
                assert TOTALS._collecting == (reports,)

            assert in_child(child) == 0
        assert [report.nbytes for report in reports] == [3]
    finally:
        end.set()
        thread.join()


# Trace events.


class Heard(list):
    """A callback that keeps what it is told."""

    def __call__(self, event):
        self.append(event)

    def ends(self, name):
        return [event for event in self if event.name == name and not isinstance(event, xds.Started)]


def test_a_read_starts_and_completes(fs, data_file):
    with xds.trace(heard := Heard()):
        fs.cat_file(data_file, 10, 30)
    (started,) = [event for event in heard if isinstance(event, xds.Started) and event.name == "read"]
    (ended,) = heard.ends("read")
    assert (started.paths, started.nbytes) == ((data_file,), 20)
    assert isinstance(ended, xds.Complete)
    assert (ended.paths, ended.nbytes, ended.number) == ((data_file,), 20, started.number)
    assert ended.report.nbytes == 20
    assert ended.seconds >= ended.report.seconds["total"] >= 0
    with pytest.raises(AttributeError):
        ended.nbytes = 3
    heard.clear()
    fs.cat_file(data_file, 10, 30)
    assert heard == []


def test_every_start_has_one_end(fs, data_file, model, content):
    array, tiny = np.empty(2 << 20, np.uint8), np.empty(10, np.uint8)
    with xds.trace(heard := Heard()):
        assert fs.cat_ranges([data_file] * 3, [0, 5, 5], [5, 9, 6]) == [content[:5], content[5:9], content[5:6]]
        fs.cat_ranges([data_file, data_file], [0, 1], [2 << 20, 2])
        fs.readinto_ranges([data_file, data_file], [0, 0], [10, 2 << 20], [tiny, array])
        with fs.open(data_file) as file:
            file.readinto(array)
            file.readline()
        xds.load(f"xds://{model}", device="cpu", framework="numpy")
        with xds.open_checkpoint(f"xds://{model}") as checkpoint:
            list(checkpoint.stream(device="cpu", framework="numpy"))
    starts = [event.number for event in heard if isinstance(event, xds.Started)]
    ends = [event.number for event in heard if isinstance(event, xds.Complete)]
    assert sorted(starts) == sorted(ends)
    assert len(starts) + len(ends) == len(heard)
    assert {"open", "read", "load"} <= {event.name for event in heard}
    assert [event.nbytes for event in heard.ends("load")] == [20000, 20000]
    assert all(event.paths == (model,) for event in heard.ends("load"))
    assert sum(event.nbytes for event in heard.ends("read")) >= 10 + 3 * (2 << 20)


def test_traced_bytes_are_those_of_the_totals(fs, data_file):
    before = xds.stats()["nbytes"]
    with xds.trace(heard := Heard()):
        fs.cat_ranges([data_file] * 4, [0, 7, 7, 9], [1 << 20, 8, 8, 30])
        fs.cat_ranges([data_file] * 2, [0, 7], [1, 8])
        fs.cat_file(data_file)
    assert sum(event.nbytes for event in heard.ends("read")) == xds.stats()["nbytes"] - before


def test_reads_that_come_as_futures(fs, data_file, tmp_path):
    array = np.empty(2 << 20, np.uint8)
    with xds.trace(heard := Heard()), fs.open(data_file) as file:
        file.pread(array, 10).get()
        future = file.pread(array)
        assert len(heard.ends("read")) == 1
        assert future.get() == future.get() == 2 << 20
        assert [event.nbytes for event in heard.ends("read")] == [10, 2 << 20]
        assert heard.ends("read")[-1].report is future.report
        forgotten = file.pread(array)
        del forgotten
        gc.collect()
        dropped = heard.ends("read")[-1]
    assert isinstance(dropped, xds.Failed)
    assert "nobody waited" in str(dropped.error)


def test_writes(fs, tmp_path):
    path = str(tmp_path / "out")
    with xds.trace(heard := Heard()), xds.collect() as reports:
        with fs.open(path, "wb") as file:
            file.write(bytes(1 << 20))
            file.pwrite(np.zeros(100, np.uint8), offset=7, require={"posting": "host"}).get()
        fs.info(path)
        fs.ls(str(tmp_path))
    assert sum(event.nbytes for event in heard.ends("write")) == (1 << 20) + 100
    assert {event.name for event in heard} == {"open", "write", "info", "list"}
    assert {event.paths for event in heard.ends("write")} == {(path,)}
    assert sum(report.nbytes for report in reports if report.operation == "write") == (1 << 20) + 100
    starts = [event.number for event in heard if isinstance(event, xds.Started)]
    assert sorted(starts) == sorted(event.number for event in heard if isinstance(event, xds.Complete))


def test_a_failure_is_told_with_its_error(fs, tmp_path):
    path = tmp_path / "shrinks"
    path.write_bytes(bytes(1000))
    with xds.trace(heard := Heard()):
        with fs.open(str(path), "rb") as file:
            os.truncate(path, 10)
            with pytest.raises(OSError, match="shrinks") as caught:
                file.read()
        (failed,) = heard.ends("read")
        assert isinstance(failed, xds.Failed)
        assert failed.error is caught.value
        assert failed.nbytes == 1000
        heard.clear()
        fs.cat_ranges([str(tmp_path / "no"), str(path)], [0, 0], [1, 1])
        (missing,) = [event for event in heard.ends("open") if isinstance(event, xds.Failed)]
        assert missing.paths == (str(tmp_path / "no"),)
        assert isinstance(missing.error, FileNotFoundError)


def test_leaving_a_stream_early_is_no_failure(model):
    with xds.trace(heard := Heard()), xds.open_checkpoint(f"xds://{model}") as checkpoint:
        stream = checkpoint.stream(device="cpu", framework="numpy")
        next(stream)
        stream.close()
    (ended,) = heard.ends("load")
    assert isinstance(ended, xds.Complete)
    assert ended.nbytes is None


def test_a_stream_that_fails_is_a_failure(model):
    with xds.trace(heard := Heard()), xds.open_checkpoint(f"xds://{model}") as checkpoint:
        stream = checkpoint.stream(device="cpu", framework="numpy")
        next(stream)
        os.utime(model, (1, 1))
        with pytest.raises(OSError, match="model"):
            list(stream)
    assert [type(event) for event in heard.ends("load")] == [xds.Failed]


def test_a_callback_that_raises_breaks_no_read_and_is_logged_once(fs, data_file, content, caplog):
    def bad(event):
        raise RuntimeError("no good")

    with caplog.at_level(logging.ERROR, "xds.trace"), xds.trace(bad), xds.trace(heard := Heard()):
        for _ in range(3):
            assert fs.cat_file(data_file, 0, 10) == content[:10]
    assert len([record for record in caplog.records if record.name == "xds.trace"]) == 1
    assert len(heard.ends("read")) == 3


def test_what_a_callback_reads_makes_no_events(fs, data_file):
    heard = []

    def reads(event):
        heard.append(event)
        fs.cat_file(data_file, 0, 1)

    with xds.trace(reads):
        fs.cat_file(data_file, 0, 10)
    assert {event.nbytes for event in heard if event.name == "read"} == {10}


def test_who_heard_the_start_hears_the_end(fs, data_file):
    heard, late = Heard(), Heard()
    registration = xds.trace(heard)
    span = observe.Span("read", data_file)
    registration.close()
    registration.close()
    with xds.trace(late):
        span.complete()
    assert [type(event) for event in heard] == [xds.Started, xds.Complete]
    assert late == []


def test_a_callback_registered_twice_is_called_twice(fs, data_file):
    heard = Heard()
    with xds.trace(heard), xds.trace(heard):
        fs.cat_file(data_file, 0, 10)
    assert len(heard.ends("read")) == 2


def test_what_is_no_callback_is_refused():
    with pytest.raises(TypeError, match="callable"):
        xds.trace("print")


def test_events_of_many_threads(fs, data_file):
    with xds.trace(heard := Heard()):
        threads = [threading.Thread(target=lambda: [fs.cat_file(data_file, 0, 9) for _ in range(50)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(heard.ends("read")) == 200
    numbers = [event.number for event in heard.ends("read")]
    assert len(set(numbers)) == 200


def test_a_forked_child_traces_too(fs, data_file, in_child):
    with xds.trace(heard := Heard()):
        fs.cat_file(data_file, 0, 3)

        def child():
            heard.clear()
            fs.cat_file(data_file, 0, 4)
            assert [event.nbytes for event in heard.ends("read")] == [4]

        assert in_child(child) == 0


def test_a_child_forked_inside_a_callback_is_inside_it_too(fs, data_file, in_child):
    codes = []

    def child():
        with xds.trace(heard := Heard()):
            fs.cat_file(data_file, 0, 4)
        assert heard == []

    with xds.trace(lambda event: codes.append(in_child(child))):
        fs.cat_file(data_file, 0, 3)
    assert set(codes) == {0}


def test_a_child_forked_while_another_thread_registers_still_registers(fs, data_file, in_child):
    def child():
        with xds.trace(heard := Heard()), xds.collect() as reports:
            fs.cat_file(data_file, 0, 4)
        assert len(heard.ends("read")) == len(reports) == 1

    with TRACE._lock, TOTALS._lock:
        assert in_child(child) == 0


def test_without_listeners_nothing_is_made(fs, data_file):
    fs.cat_file(data_file, 0, 10)
    gc.collect()
    before = TRACE.number()
    fs.cat_file(data_file, 0, 10)
    fs.cat_ranges([data_file] * 2, [0, 1], [1, 2])
    assert TRACE.number() == before + 1


# NVTX.


class FakeNvtx:
    """Stands in for the package nvtx."""

    def __init__(self):
        self.begun, self.ended = [], []

    def start_range(self, message, domain, category):
        self.begun.append((message, domain, category))
        return len(self.begun)

    def end_range(self, number):
        self.ended.append(number)


def test_nvtx_ranges(fs, data_file, monkeypatch):
    fake = FakeNvtx()
    monkeypatch.setitem(sys.modules, "nvtx", fake)
    xds.trace_nvtx(True)
    xds.trace_nvtx(True)
    try:
        fs.cat_file(data_file, 0, 10)
    finally:
        xds.trace_nvtx(False)
        xds.trace_nvtx(False)
    assert (f"read {data_file}", "xds", "read") in fake.begun
    assert sorted(fake.ended) == list(range(1, len(fake.begun) + 1))
    count = len(fake.begun)
    fs.cat_file(data_file, 0, 10)
    assert len(fake.begun) == count


def test_nvtx_ranges_of_many_files(monkeypatch):
    fake = FakeNvtx()
    monkeypatch.setitem(sys.modules, "nvtx", fake)
    xds.trace_nvtx()
    try:
        with observe.Span("load", "/a", "/b", "/c"):
            pass
        with observe.Span("load"):
            pass
    finally:
        xds.trace_nvtx(False)
    assert [message for message, _, _ in fake.begun] == ["load /a and 2 more", "load"]


def test_without_the_package_nvtx_it_is_told_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvtx", None)
    with pytest.raises(ImportError, match="pip install nvtx"):
        xds.trace_nvtx(True)


def test_with_the_real_nvtx(fs, data_file, content):
    pytest.importorskip("nvtx", reason="the package nvtx is not installed")
    xds.trace_nvtx(True)
    try:
        assert fs.cat_file(data_file, 0, 10) == content[:10]
    finally:
        xds.trace_nvtx(False)


@pytest.mark.parametrize(
    ("value", "present", "listens"), [("1", True, 1), ("0", True, 0), ("", True, 0), ("1", False, 0)]
)
def test_the_environment_turns_nvtx_on(value, present, listens):
    code = (
        "import sys, types\n"
        f"sys.modules['nvtx'] = types.ModuleType('nvtx') if {present} else None\n"
        "from xds.observe import TRACE\n"
        f"assert len(TRACE.callbacks) == {listens}\n"
    )
    env = {**os.environ, "XDS_NVTX": value}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert ("pip install nvtx" in done.stderr) == (not present)
