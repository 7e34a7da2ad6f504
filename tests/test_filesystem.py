from __future__ import annotations

import asyncio
import datetime
import errno
import gc
import inspect
import json
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import fsspec
import numpy as np
import pytest
from fsspec.asyn import AsyncFileSystem, async_methods
from fsspec.spec import AbstractFileSystem
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import xds
from xds.errors import (
    ArrayError,
    FileChangedError,
    ReadOnlyError,
    RequirementError,
    UrlError,
    XdsError,
)
from xds.filesystem import StorageFileSystem, XdsFileSystem
from xds.writable import WritableFileSystem

BOUND = st.one_of(st.none(), st.integers(-30, 30), st.integers(-(1 << 70), 1 << 70))
SLOW = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
NAMES = [
    "a b",
    "100%41",
    "#hash",
    "what?",
    "[0]",
    "[",
    "*",
    "new\nline",
    "zwölf",
    "{x}",
    "~",
    "a&b=c",
    "\udcff",
    " ",
    ";",
]


@pytest.fixture
def tree(tmp_path):
    """A folder with two levels, links, and files that no text editor likes."""
    root = tmp_path / "tree"
    (root / "sub" / "deep").mkdir(parents=True)
    (root / "empty").mkdir()
    (root / "a.txt").write_bytes(b"aaa")
    (root / "b.bin").write_bytes(b"b" * 1000)
    (root / "sub" / "c.txt").write_bytes(b"c")
    (root / "sub" / "deep" / "d.txt").write_bytes(b"")
    return str(root)


# Slices.


@given(st.binary(max_size=25), BOUND, BOUND)
@SLOW
def test_cat_file_is_a_slice(fs, tmp_path, data, start, end):
    path = tmp_path / "slice"
    path.write_bytes(data)
    assert fs.cat_file(str(path), start, end) == data[start:end]


@given(st.lists(st.tuples(st.integers(0, 2), BOUND, BOUND), max_size=12))
@SLOW
def test_cat_ranges_are_slices(fs, tmp_path, ranges):
    contents = [b"", b"0123456789", bytes(range(256))]
    paths = [str(tmp_path / f"f{index}") for index in range(3)]
    for path, data in zip(paths, contents, strict=True):
        if not os.path.exists(path):
            Path(path).write_bytes(data)
    got = fs.cat_ranges([paths[i] for i, _, _ in ranges], [s for _, s, _ in ranges], [e for _, _, e in ranges])
    assert got == [contents[i][s:e] for i, s, e in ranges]


@given(
    st.lists(
        st.tuples(st.integers(-4 << 20, 4 << 20), st.one_of(st.none(), st.integers(-4 << 20, 4 << 20))), max_size=6
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=25)
def test_wide_ranges_are_slices_too(fs, data_file, content, ranges):
    got = fs.cat_ranges([data_file] * len(ranges), [s for s, _ in ranges], [e for _, e in ranges], on_error="raise")
    assert got == [content[s:e] for s, e in ranges]
    arrays = [np.zeros(len(content[s:e]), np.uint8) for s, e in ranges]
    report = fs.readinto_ranges([data_file] * len(ranges), [s for s, _ in ranges], [e for _, e in ranges], arrays)
    assert [array.tobytes() for array in arrays] == [content[s:e] for s, e in ranges]
    assert report.nbytes == sum(array.nbytes for array in arrays)


def test_bounds_are_integers_of_any_kind_and_nothing_else(fs, data_file, content):
    assert fs.cat_file(data_file, np.int64(5), np.uint8(9)) == content[5:9]
    assert fs.cat_file(data_file, True, 3) == content[1:3]
    for wrong in ("1", 1.0, b"1"):
        with pytest.raises(TypeError):
            fs.cat_file(data_file, wrong)
        with pytest.raises(TypeError):
            fs.cat_ranges([data_file], [wrong], [None])


def test_cat_ranges_broadcasts_repeats_and_keeps_the_order(fs, data_file, content):
    assert fs.cat_ranges([data_file] * 3, 5, 9) == [content[5:9]] * 3
    assert fs.cat_ranges([data_file] * 2, None, None) == [content] * 2
    assert fs.cat_ranges([data_file] * 2, -5, None) == [content[-5:]] * 2
    assert fs.cat_ranges([data_file] * 3, [10, 0, 5], np.array([20, 10, 15])) == [
        content[10:20],
        content[:10],
        content[5:15],
    ]
    assert fs.cat_ranges((data_file,), (1,), (2,)) == [content[1:2]]
    assert fs.cat_ranges([], [], []) == fs.cat_ranges([], 0, 1) == []
    assert fs.cat_ranges(["xds://" + data_file], 0, 3, max_gap=100, batch_size=3) == [content[:3]]


def test_cat_ranges_checks_its_arguments(fs, data_file):
    for starts, ends in (([1], [2, 3]), ([1, 2], [3]), ([], [1, 2])):
        with pytest.raises(ValueError, match="for 2 paths"):
            fs.cat_ranges([data_file] * 2, starts, ends)
    with pytest.raises(TypeError, match="list"):
        fs.cat_ranges(data_file, [0], [1])
    with pytest.raises(ValueError, match="on_error"):
        fs.cat_ranges([data_file], 0, 1, on_error="omit")


@pytest.mark.parametrize("nbytes", [10, 2 << 20])
def test_cat_ranges_on_error(fs, data_file, content, tmp_path, nbytes):
    paths = [data_file, str(tmp_path / "missing"), str(tmp_path), data_file, data_file]
    got = fs.cat_ranges(paths, 0, nbytes)
    assert got[0] == got[3] == got[4] == content[:nbytes]
    assert isinstance(got[1], FileNotFoundError)
    assert isinstance(got[2], IsADirectoryError)
    with pytest.raises(FileNotFoundError):
        fs.cat_ranges(paths, 0, nbytes, on_error="raise")


def test_cat_ranges_opens_each_file_once(fs, data_file, monkeypatch):
    opened = []
    real = fs.backend.open
    monkeypatch.setattr(fs.backend, "open", lambda path: opened.append(path) or real(path), raising=False)
    fs.cat_ranges([data_file] * 50, 0, 10)
    fs.cat_ranges([data_file] * 5, 0, 1 << 20)
    fs.readinto_ranges([data_file] * 50, 0, 10, [bytearray(10) for _ in range(50)])
    assert opened == [data_file] * 3


class ChangingBackend:
    """The real backend; after its ``count``-th handle is opened, ``change`` runs."""

    def __init__(self, real, change):
        self.real, self.change = real, change

    def __getattr__(self, name):
        return getattr(self.real, name)

    def open(self, path):
        handle = self.real.open(path)
        self.change(path)
        return handle


def shrink(path):
    os.truncate(path, 1000)


def grow(path):
    with open(path, "ab") as file:
        file.write(b"more")


def replace(path):
    Path(path + ".new").write_bytes(Path(path).read_bytes())
    Path(path + ".new").replace(path)


@pytest.mark.parametrize("nbytes", [5000, 2 << 20])
@pytest.mark.parametrize("change", [shrink, grow, replace])
def test_a_file_that_changes_between_open_and_end_is_an_error(data_file, content, tmp_path, nbytes, change):
    fs = XdsFileSystem(skip_instance_cache=True)
    good = tmp_path / "good"
    good.write_bytes(content)
    fs.backend = ChangingBackend(fs.backend, lambda path: path == data_file and change(path))
    errors = xds.stats()["errors"]
    with pytest.raises(FileChangedError, match=data_file):
        fs.cat_file(data_file, 0, nbytes)
    Path(data_file).write_bytes(content)
    got = fs.cat_ranges([str(good), data_file, str(good)], 0, nbytes)
    assert isinstance(got[1], FileChangedError)
    assert got[0] == got[2] == content[:nbytes]
    Path(data_file).write_bytes(content)
    with pytest.raises(FileChangedError, match=data_file):
        fs.readinto_ranges([str(good), data_file], 0, nbytes, [bytearray(nbytes), bytearray(nbytes)])
    if change is shrink or nbytes < 1 << 20:
        assert xds.stats()["errors"] > errors


# Reads into arrays.


def test_readinto_ranges_of_many_files(fs, tmp_path, content):
    paths = []
    for index in range(5):
        path = tmp_path / f"f{index}"
        path.write_bytes(content[index:])
        paths.append(str(path))
    order = [0, 3, 1, 1, 4, 2]
    arrays = [
        np.zeros((1 << 20) // 4, "<i4"),
        bytearray(7),
        np.zeros((3, 5)),
        memoryview(bytearray(9)),
        np.zeros(0),
        bytearray(1),
    ]
    sizes = [1 << 20, 7, 120, 9, 0, 1]
    report = fs.readinto_ranges(
        [paths[i] for i in order], [i for i in order], [i + n for i, n in zip(order, sizes, strict=True)], arrays
    )
    for index, array, size in zip(order, arrays, sizes, strict=True):
        assert np.asarray(array).tobytes() == content[2 * index : 2 * index + size]
    assert report.nbytes == sum(sizes) == report.posting["host"] == report.placement["mapped"]
    assert report.device is None
    assert report.seconds["total"] > 0


def test_readinto_ranges_of_nothing(fs, data_file):
    assert fs.readinto_ranges([], [], [], []).nbytes == 0
    assert fs.readinto_ranges([data_file], 5, 5, [bytearray()]).nbytes == 0
    assert fs.readinto_ranges([data_file], 5, 5, [np.zeros(0)], require={"posting": "host"}).nbytes == 0
    assert fs.readinto_ranges([], [], [], [], require={"posting": "host"}).nbytes == 0


@pytest.mark.parametrize("nbytes", [10, 2 << 20])
def test_readinto_ranges_checks_everything_before_a_byte_moves(fs, data_file, tmp_path, nbytes):
    good = np.full(nbytes, 7, np.uint8)
    other = np.full(nbytes, 7, np.uint8)
    cases = [
        ([data_file] * 2, 0, nbytes, [good], {}, ValueError, "1 arrays for 2 paths"),
        ([data_file] * 2, [0], nbytes, [good, other], {}, ValueError, "1 starts for 2 paths"),
        ([data_file] * 2, 0, nbytes, [good, other[1:]], {}, ArrayError, "size of the range"),
        ([data_file] * 2, [0, -3], [nbytes, None], [good, other], {}, ArrayError, "holds 3 bytes"),
        ([data_file] * 2, 0, nbytes, [good, b"x" * nbytes], {}, ArrayError, "read-only"),
        ([data_file] * 2, 0, nbytes, [good, np.zeros((nbytes, 2), "u1")[:, 0]], {}, ArrayError, "contiguous"),
        ([data_file] * 2, 0, nbytes, [good, good], {}, ArrayError, "overlap"),
        ([data_file, str(tmp_path / "no")], 0, nbytes, [good, other], {}, FileNotFoundError, "no"),
        ([data_file, str(tmp_path)], 0, nbytes, [good, other], {}, IsADirectoryError, "directory"),
        ([data_file] * 2, 0, nbytes, [good, other], {"require": {"posting": "gpu"}}, RequirementError, "posting"),
        ([data_file] * 2, 0, nbytes, [good, other], {"require": {"x": "y"}}, ValueError, "unknown key"),
    ]
    for paths, starts, ends, arrays, options, error, words in cases:
        with pytest.raises(error, match=words):
            fs.readinto_ranges(paths, starts, ends, arrays, **options)
        assert (good == 7).all()
        assert (other == 7).all()


def test_overlap_by_one_byte_is_refused_and_neighbours_are_fine(fs, data_file, content):
    base = np.zeros(100, np.uint8)
    with pytest.raises(ArrayError, match="arrays 0 and 1 overlap"):
        fs.readinto_ranges([data_file] * 2, 0, [50, 51], [base[:50], base[49:]])
    fs.readinto_ranges([data_file] * 3, [0, 50, 0], [50, 100, 0], [base[:50], base[50:], base[20:20]])
    assert base.tobytes() == content[:100]


class DeviceBackend:
    """Records transfers; arrays of any device are told and not touched."""

    def __init__(self, real):
        self.real, self.made = real, []

    def open(self, path):
        return self.real.open(path)

    def transfer(self, handles, *, device=None, require=None, timeout_s=60.0):
        backend = self

        class Transfer:
            def __init__(self):
                self.batches = []

            def add(self, segments, *, stream=None, keepalive=None):
                self.batches.append((segments.tolist(), stream))
                return 0

            def seal(self):
                pass

            def wait(self):
                nbytes = sum(row[1] for rows, _ in self.batches for row in rows)
                return xds.ReadReport(nbytes, {"host": nbytes}, device=device, seconds={"total": 1.0}, notes=("n",))

            def __enter__(self):
                backend.made.append((device, self.batches))
                return self

            def __exit__(self, *exc):
                pass

        return Transfer()


def test_each_device_has_one_transfer_and_each_stream_one_batch(data_file, monkeypatch):
    from xds import ranges
    from xds.arrays import Destination

    fs = XdsFileSystem(skip_instance_cache=True)
    backend = fs.backend = DeviceBackend(fs.backend)
    targets = [
        Destination(1000, 10, 0, 5, None),
        Destination(1000, 10, 1, 0, None),
        Destination(2000, 10, 0, 6, None),
        Destination(3000, 10, None, None, None),
        Destination(4000, 10, 0, 5, None),
    ]
    monkeypatch.setattr(ranges, "destination", lambda array, stream=None: array)
    report = fs.readinto_ranges([data_file] * 5, [0, 10, 20, 30, 40], [10, 20, 30, 40, 50], targets)
    assert backend.made == [
        (0, [([(0, 10, 1000, 0, 0), (40, 10, 4000, 0, 0)], 5), ([(20, 10, 2000, 0, 0)], 6)]),
        (1, [([(10, 10, 1000, 0, 0)], 0)]),
        (None, [([(30, 10, 3000, 0, 0)], None)]),
    ]
    assert report.nbytes == 50
    assert report.posting == {"host": 50}
    assert report.device is None
    assert report.notes == ("n",)


# Names and folders.


def test_info_ls_and_their_friends(fs, tree):
    assert (
        [entry["name"] for entry in fs.ls(tree)]
        == fs.ls(tree, detail=False)
        == [f"{tree}/{name}" for name in ("a.txt", "b.bin", "empty", "sub")]
    )
    for entry in fs.ls("xds://" + tree):
        assert entry == fs.info(entry["name"]) == fs.stat("xds://" + entry["name"])
    assert fs.ls(tree + "/a.txt", detail=False) == [tree + "/a.txt"]
    assert fs.listdir(tree) == fs.ls(tree, refresh=True)
    assert fs.isdir(tree)
    assert not fs.isfile(tree)
    assert fs.isfile(tree + "/a.txt")
    assert not fs.isdir(tree + "/a.txt")
    assert fs.size(tree + "/b.bin") == 1000
    assert fs.sizes([tree + "/a.txt", tree + "/b.bin"]) == [3, 1000]
    assert fs.du(tree) == 1004
    assert fs.ls(tree + "/empty") == []
    assert fs.isdir("/")
    assert fs.isdir("xds://")


def test_times_are_aware(fs, data_file):
    os.utime(data_file, (0, 1.5))
    assert fs.modified(data_file) == datetime.datetime(1970, 1, 1, 0, 0, 1, 500000, datetime.UTC)
    assert fs.created(data_file).tzinfo is datetime.UTC


def test_exists_is_false_only_for_what_is_not_there(fs, tree, tmp_path, as_nobody):
    (tmp_path / "dangling").symlink_to("nowhere")
    assert fs.exists(tree)
    assert fs.exists("xds://" + tree + "/a.txt")
    for missing in ("/no", tree + "/no", tree + "/a.txt/below", str(tmp_path / "dangling")):
        assert not fs.exists(missing)
        assert not fs.isfile(missing)
        assert not fs.isdir(missing)
    assert fs.lexists(str(tmp_path / "dangling"))
    assert fs.islink(str(tmp_path / "dangling"))
    assert not fs.lexists("/no")
    with pytest.raises(OSError, match="too long"):
        fs.exists("/" + "x" * 5000)
    with pytest.raises(UrlError):
        fs.exists("xds://relative")


def test_exists_raises_where_nobody_may_look(fs, tree, as_nobody):
    os.chmod(tree, 0o700)  # noqa: PTH101 (a str)

    def check():
        for question in (fs.exists, fs.isfile, fs.isdir, fs.info, fs.ls, fs.cat_file):
            with pytest.raises(PermissionError):
                question(tree + "/a.txt" if question is not fs.ls else tree)

    assert as_nobody(check) == 0


@pytest.mark.parametrize("name", NAMES)
def test_names_are_taken_by_the_letter(fs, tmp_path, name):
    path = tmp_path / "names" / name
    path.parent.mkdir()
    path.write_bytes(name.encode("utf-8", "surrogateescape"))
    expected = path.read_bytes()
    url = fs.unstrip_protocol(str(path))
    assert url == f"xds://{path}"
    assert fs._strip_protocol(url) == str(path)
    assert fs.ls(str(path.parent), detail=False) == [str(path)]
    assert fs.find(str(path.parent)) == [str(path)]
    assert fs.exists(url)
    assert fs.cat_file(url) == expected
    assert fs.cat_ranges([url], 0, None) == [expected]
    with fs.open(url) as file:
        assert file.read() == expected
    with fsspec.open(url, expand=False) as file:
        assert file.read() == expected


def test_a_name_with_two_colons_is_reached_by_path(fs, tmp_path):
    # In a URL given to fsspec.open, "::" chains file systems.
    path = tmp_path / "a::b"
    path.write_bytes(b"x")
    with fs.open(str(path)) as file:
        assert file.read() == b"x"
    assert fs.cat_file(f"xds://{path}") == b"x"


def test_walk_find_glob_agree_with_local_files(fs, tree):
    local = fsspec.filesystem("file")
    assert fs.find(tree) == local.find(tree)
    assert fs.find(tree, maxdepth=1) == local.find(tree, maxdepth=1)
    assert fs.find(tree, withdirs=True) == local.find(tree, withdirs=True)
    assert fs.find(tree + "/a.txt") == [tree + "/a.txt"]
    assert fs.find(tree + "/no") == []
    assert fs.find(tree, detail=True)[tree + "/a.txt"] == fs.info(tree + "/a.txt")
    for pattern in ("/*", "/**", "/*.txt", "/**/*.txt", "/sub/", "/s*/", "/[ab].*", "/?.txt", "/no*", "/a.txt"):
        assert fs.glob(tree + pattern) == local.glob(tree + pattern), pattern
        assert fs.glob("xds://" + tree + pattern) == local.glob(tree + pattern), pattern
    for options in ({}, {"maxdepth": 1}, {"maxdepth": 2}, {"topdown": False}):
        ours = [(path, sorted(d), sorted(f)) for path, d, f in fs.walk(tree, **options)]
        theirs = [(path, sorted(d), sorted(f)) for path, d, f in local.walk(tree, **options)]
        assert sorted(ours) == sorted(theirs)
    assert fs.expand_path(tree + "/*.txt") == [tree + "/a.txt"]
    assert fs.expand_path(tree, recursive=True) == local.expand_path(tree, recursive=True)
    assert fs.cat(tree + "/*.txt") == {tree + "/a.txt": b"aaa"}
    assert fs.cat(tree + "/a.txt") == b"aaa"
    assert fs.head(tree + "/b.bin", 3) == fs.tail(tree + "/b.bin", 3) == b"bbb"
    assert fs.read_block(tree + "/b.bin", 1, 4) == b"bbbb"
    with pytest.raises(ValueError, match="maxdepth"):
        list(fs.walk(tree, maxdepth=0))


def test_walk_can_be_pruned_and_reports_errors(fs, tree):
    seen = []
    for path, folders, _ in fs.walk(tree):
        seen.append(path)
        if "sub" in folders:
            folders.remove("sub")
    assert seen == [tree, tree + "/empty"]
    errors = []
    assert list(fs.walk(tree + "/no")) == list(fs.walk(tree + "/no", on_error=errors.append)) == []
    assert [type(error) for error in errors] == [FileNotFoundError]
    with pytest.raises(FileNotFoundError):
        list(fs.walk(tree + "/no", on_error="raise"))
    details = next(iter(fs.walk(tree, detail=True)))
    assert details[1]["sub"]["type"] == "directory"


def test_links_that_lead_back_up_end_the_walk(fs, tree):
    Path(tree, "sub", "up").symlink_to("..")
    Path(tree, "sub", "file").symlink_to("../a.txt")
    assert fs.find(tree) == [f"{tree}/{name}" for name in ("a.txt", "b.bin", "sub/c.txt", "sub/deep/d.txt", "sub/file")]
    assert f"{tree}/sub/up" in fs.find(tree, withdirs=True)
    assert fs.du(tree) == 1007
    assert fs.ls(f"{tree}/sub/up", detail=False)[0] == f"{tree}/sub/up/a.txt"


def test_get(fs, tree, tmp_path):
    fs.get(tree, str(tmp_path / "copy"), recursive=True)
    assert (tmp_path / "copy" / "sub" / "c.txt").read_bytes() == b"c"
    fs.get_file(tree + "/b.bin", str(tmp_path / "b"))
    assert (tmp_path / "b").read_bytes() == b"b" * 1000
    from fsspec.callbacks import Callback

    callback = Callback()
    fs.get_file(tree + "/b.bin", str(tmp_path / "b"), callback=callback)
    assert (callback.size, callback.value) == (1000, 1000)
    mapper = fs.get_mapper(tree)
    assert mapper["sub/c.txt"] == b"c"
    assert set(mapper) == {"a.txt", "b.bin", "sub/c.txt", "sub/deep/d.txt"}


def test_ukey_and_checksum_follow_the_bytes(fs, data_file):
    first = fs.ukey(data_file)
    Path(data_file).read_bytes()
    assert fs.ukey(data_file) == fs.ukey("xds://" + data_file) == first
    assert fs.checksum(data_file) == int(first, 16)
    os.utime(data_file, ns=(0, 1))
    assert fs.ukey(data_file) != first
    replace(data_file)
    os.utime(data_file, ns=(0, 1))
    assert fs.ukey(data_file) != first


# The contract of fsspec.


def test_one_instance_for_all(fs):
    assert fsspec.filesystem("xds") is fs is XdsFileSystem() is fsspec.filesystem("xds")
    assert fsspec.core.url_to_fs("xds:///a/b") == (fs, "/a/b")
    assert fs.protocol == "xds"
    assert fs.root_marker == "/"
    assert not hasattr(fs, "local_file")
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(fsspec.filesystem("xds"))) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(one is fs for one in found)


def test_options_travel(fs):
    options = {"use_listings_cache": False, "batch_size": 4, "skip_instance_cache": True}
    other = fsspec.filesystem("xds", **options)
    assert other is not fs
    for copy in (pickle.loads(pickle.dumps(other)), AbstractFileSystem.from_json(other.to_json())):
        assert type(copy) is XdsFileSystem
        assert copy.batch_size == 4
    assert pickle.loads(pickle.dumps(fs)) is fs
    assert json.loads(fs.to_json())["protocol"] == "xds"
    asynchronous = AbstractFileSystem.from_dict({**fs.to_dict(), "asynchronous": True})
    assert asynchronous.asynchronous


def overridden():
    """Names of the sync methods that fsspec's mirror would fill, were they not defined here."""
    return sorted(
        name[1:]
        for name in set(async_methods) | set(dir(AsyncFileSystem))
        if name.startswith("_") and not name.startswith("__") and hasattr(AbstractFileSystem, name[1:])
        and (inspect.iscoroutinefunction(getattr(AsyncFileSystem, name, None)) or name in ("_walk",))
    )  # fmt: skip


def test_no_sync_method_hops_over_an_event_loop(fs):
    # Fails when fsspec changes the rule by which the methods of a class survive its mirror.
    names = overridden()
    assert {"cat_file", "cat_ranges", "info", "ls", "exists", "get_file", "find", "glob", "walk", "rm"} <= set(names)
    for name in names:
        assert name not in vars(fs), f"{name} was replaced by fsspec's mirror"
        owner = next(cls for cls in type(fs).__mro__ if name in vars(cls))
        assert owner.__module__.startswith("xds."), f"{name} is not defined here"


def test_sync_methods_work_without_a_loop(data_file, content):
    fs = XdsFileSystem(asynchronous=True)
    assert fs.cat_file(data_file, 0, 5) == content[:5]
    assert fs.find(os.path.dirname(data_file)) == [data_file]


def test_the_coroutines_give_the_same(fs, tree, data_file, content, tmp_path):
    async def check():
        fs = XdsFileSystem(asynchronous=True)
        assert await fs._info(data_file) == fs.info(data_file)
        assert await fs._ls(tree) == fs.ls(tree)
        assert await fs._ls(tree, detail=False) == fs.ls(tree, detail=False)
        assert await fs._exists(tree)
        assert not await fs._exists(tree + "/no")
        assert await fs._isfile(data_file)
        assert await fs._isdir(tree)
        assert await fs._size(data_file) == len(content)
        assert await fs._sizes([data_file]) == [len(content)]
        assert await fs._cat_file(data_file, -5) == content[-5:]
        assert await fs._cat_file(data_file) == content
        assert await fs._cat_ranges([data_file] * 2, [0, 5], [5, None]) == [content[:5], content[5:]]
        assert await fs._cat(tree + "/*.txt") == {tree + "/a.txt": b"aaa"}
        assert await fs._find(tree) == fs.find(tree)
        assert await fs._glob(tree + "/**") == fs.glob(tree + "/**")
        assert await fs._du(tree) == fs.du(tree)
        assert await fs._expand_path(tree, recursive=True) == fs.expand_path(tree, recursive=True)
        assert [step async for step in fs._walk(tree)] == list(fs.walk(tree))
        await fs._get_file(data_file, str(tmp_path / "got"))
        assert (tmp_path / "got").read_bytes() == content
        await fs._get(tree, str(tmp_path / "copy"), recursive=True)
        assert (tmp_path / "copy" / "a.txt").read_bytes() == b"aaa"
        many = await asyncio.gather(*(fs._cat_file(data_file, n, n + 100) for n in range(200)))
        assert many == [content[n : n + 100] for n in range(200)]
        with pytest.raises(FileNotFoundError):
            await fs._cat_file(tree + "/no")

    asyncio.run(check())


def test_a_coroutine_never_blocks_the_loop(data_file):
    async def check():
        fs = XdsFileSystem(asynchronous=True, skip_instance_cache=True)
        gate, real = threading.Event(), fs.backend

        class Backend:
            def open(self, path):
                assert gate.wait(30)
                return real.open(path)

            def __getattr__(self, name):
                return getattr(real, name)

        fs.backend = Backend()
        task = asyncio.ensure_future(fs._cat_file(data_file, 0, 10))
        await asyncio.sleep(0.01)  # comes back although the read cannot go on
        assert not task.done()
        gate.set()
        assert len(await task) == 10

    asyncio.run(check())


WRITERS = {
    "mkdir": ("/a",), "makedirs": ("/a",), "makedir": ("/a",), "mkdirs": ("/a",), "rmdir": ("/a",), "rm": ("/a",),
    "rm_file": ("/a",), "mv_file": ("/a", "/b"), "delete": ("/a",),
    "cp_file": ("/a", "/b"), "copy": ("/a", "/b"), "cp": ("/a", "/b"),
    "mv": ("/a", "/b"), "move": ("/a", "/b"), "rename": ("/a", "/b"), "put": ("/a", "/b"), "put_file": ("/a", "/b"),
    "upload": ("/a", "/b"), "pipe": ("/a", b""), "pipe_file": ("/a", b""), "touch": ("/a",),
    "write_text": ("/a", ""), "write_bytes": ("/a", b""),
}  # fmt: skip


class ReadOnlyBackend:
    """Has what reads, and nothing else."""

    def __init__(self, real):
        self.info, self.ls, self.open, self.transfer = real.info, real.ls, real.open, real.transfer


@pytest.fixture
def read_only_fs(fs):
    other = XdsFileSystem(skip_instance_cache=True)
    other.backend = ReadOnlyBackend(fs.backend)
    return other


@pytest.mark.parametrize("name", WRITERS)
def test_writers_raise_at_once(read_only_fs, name):
    fs = read_only_fs
    with pytest.raises(ReadOnlyError, match="xds:// only reads") as caught:
        getattr(fs, name)(*WRITERS[name])
    assert caught.value.errno == errno.EROFS
    assert caught.value.filename is not None
    coroutine = getattr(fs, f"_{name}", None)
    if coroutine is not None:
        with pytest.raises(ReadOnlyError):
            asyncio.run(coroutine(*WRITERS[name]))


def test_every_writer_of_the_class_is_refused():
    # What is added later must be refused too.
    own = {name for name in vars(WritableFileSystem) if not name.startswith("_")}
    assert own - set(WRITERS) == {"get", "get_file"}


def test_read_only_pipe_of_many_and_transactions(read_only_fs):
    fs = read_only_fs
    with pytest.raises(ReadOnlyError):
        fs.pipe({"/a": b"", "/b": b""})
    with pytest.raises(ReadOnlyError), fs.transaction:
        fs.open("/a", "wb")


@pytest.mark.parametrize("mode", ["w", "wb", "a", "ab", "x", "xb", "r+", "r+b", "w+b"])
def test_read_only_open_for_writing_raises_and_leaves_the_file(read_only_fs, data_file, content, mode):
    fs = read_only_fs
    with pytest.raises(ReadOnlyError):
        fs.open(data_file, mode)
    assert Path(data_file).read_bytes() == content


def test_open_errors(fs, tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        fs.open(str(tmp_path / "no"))
    assert caught.value.errno == errno.ENOENT
    assert caught.value.filename == str(tmp_path / "no")
    with pytest.raises(IsADirectoryError):
        fs.open(str(tmp_path))
    os.mkfifo(tmp_path / "fifo")
    for call in (fs.open, fs.cat_file):
        with pytest.raises(XdsError, match="FIFO"):
            call(str(tmp_path / "fifo"))
    with pytest.raises(ValueError, match="mode"):
        fs.open(str(tmp_path / "fifo"), "q")


def test_stats_count_every_read(fs, data_file, content):
    before = xds.stats()
    fs.cat_file(data_file, 0, 100)
    fs.cat_file(data_file)
    after = xds.stats()
    assert after["reads"] == before["reads"] + 2
    assert after["nbytes"] == before["nbytes"] + 100 + len(content)
    assert after["posting"]["host"] == before["posting"].get("host", 0) + 100 + len(content)


# Many threads, many processes.


def test_200_threads_on_one_instance(fs, data_file, content):
    failures: list[object] = []
    barrier = threading.Barrier(200)

    def work(index):
        try:
            barrier.wait(60)
            start = index * 997
            for round_ in range(5):
                if fs.cat_file(data_file, start, start + 5000) != content[start : start + 5000]:
                    failures.append(("cat_file", index))
                array = np.zeros(3000, np.uint8)
                fs.readinto_ranges([data_file], start, start + 3000, [array])
                if array.tobytes() != content[start : start + 3000]:
                    failures.append(("readinto_ranges", index))
                if round_ == 0 and index % 10 == 0:
                    wide = fs.cat_ranges([data_file] * 2, [0, start], [1 << 20, None], on_error="raise")
                    if wide != [content[: 1 << 20], content[start:]]:
                        failures.append(("cat_ranges", index))
            with fs.open(data_file) as file:
                file.seek(start)
                if file.read(10) != content[start : start + 10]:
                    failures.append(("read", index))
        except BaseException as error:
            failures.append(error)

    before = len(os.listdir("/proc/self/fd"))
    threads = [threading.Thread(target=work, args=(index,)) for index in range(200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert failures == []
    assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_a_forked_child_reads_afresh(fs, data_file, content, in_child):
    assert fs.cat_file(data_file) == content
    file = fs.open(data_file)

    def check():
        inherited = fs
        for one in (inherited, fsspec.filesystem("xds")):
            assert one.cat_file(data_file, 0, 100) == content[:100]
            assert one.cat_file(data_file) == content
            assert one.cat_ranges([data_file] * 2, 0, 2 << 20, on_error="raise") == [content[: 2 << 20]] * 2
            assert one.find(os.path.dirname(data_file)) == [data_file]
            assert one.exists(data_file)
            array = np.zeros(len(content), np.uint8)
            assert one.readinto_ranges([data_file], None, None, [array]).nbytes == len(content)
            assert array.tobytes() == content
        assert fsspec.filesystem("xds") is not inherited
        file.seek(7)
        assert file.read(10) == content[7:17]
        assert file.pread(np.zeros(2 << 20, np.uint8)).get() == 2 << 20
        assert asyncio.run(XdsFileSystem(asynchronous=True)._cat_file(data_file, 0, 5)) == content[:5]

    for _ in range(3):
        assert in_child(check) == 0
    assert file.tell() == 0
    assert file.read(5) == content[:5]
    assert fs.cat_file(data_file) == content
    file.close()


def test_a_child_forked_in_the_middle_of_reads(fs, data_file, content, in_child):
    # Other threads may be anywhere in a read; nothing may be left locked in the child.
    stop = threading.Event()

    def reader():
        while not stop.is_set():
            fs.cat_file(data_file, 0, 4096)
            fs.cat_file(data_file)

    threads = [threading.Thread(target=reader) for _ in range(4)]
    for thread in threads:
        thread.start()

    def check():
        assert fs.cat_file(data_file, 5, 10) == content[5:10]
        assert fs.cat_file(data_file) == content

    try:
        assert [in_child(check) for _ in range(10)] == [0] * 10
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_torch_data_loader_with_forked_workers(fs, tmp_path):
    pytest.importorskip("torch", reason="torch is not installed")
    code = f"""
import sys, warnings
import fsspec, numpy as np, torch
warnings.filterwarnings("ignore", category=DeprecationWarning)
fs = fsspec.filesystem("xds")
path = "xds://{tmp_path}/rows"
rows = np.arange(64 * 300_000, dtype=np.int32).reshape(64, -1)
rows.tofile("{tmp_path}/rows")
assert fs.cat_file(path, 0, 4) == bytes(4)
assert len(fs.cat_file(path)) == rows.nbytes

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        row = torch.empty(300_000, dtype=torch.int32)
        with fs.open(path) as file:
            file.seek(index * 1_200_000)
            assert file.readinto(row) == 1_200_000
        return row

loader = torch.utils.data.DataLoader(Rows(), batch_size=8, num_workers=2, multiprocessing_context="fork")
for _ in range(2):
    got = torch.cat(list(loader))
    assert (got.numpy() == rows).all()
print("read", len(got))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "read 64\n"


# What is imported.


def test_import_is_light():
    code = """
import sys, time
import fsspec, numpy
before, begin = set(sys.modules), time.perf_counter()
import xds
first = time.perf_counter() - begin
assert not {"xds.filesystem", "xds.checkpoint", "xds.native"} & set(sys.modules)
begin = time.perf_counter()
import xds.filesystem
print(f"import xds: {first * 1e3:.2f} ms, xds.filesystem: {(time.perf_counter() - begin) * 1e3:.2f} ms")
fs = fsspec.filesystem("xds")
assert fs.exists("/") and fs.ls("/") and len(fs.cat_file(sys.executable, 0, 1000)) == 1000
heavy = {"cupy", "torch", "jax", "typer", "rich", "ml_dtypes", "xds.native", "xds.checkpoint", "xds.engine.mover"}
loaded = {name for name in set(sys.modules) - before if name in heavy or name.partition(".")[0] in heavy}
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    assert "import xds" in done.stdout


def test_public_names():
    from importlib.metadata import version

    assert dir(xds) == sorted(xds.__all__)
    assert xds.__version__ == version("xpu-direct-storage")
    assert xds.errors.XdsError is XdsError
    assert xds.XdsFileSystem is XdsFileSystem
    assert issubclass(XdsFileSystem, StorageFileSystem)
    for name in xds.__all__:
        assert getattr(xds, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        xds.nonsense


def test_close_twice(fs, data_file, content):
    xds.close()
    xds.close()
    assert fs.cat_file(data_file) == content
    xds.close()
