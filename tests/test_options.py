"""Storage options: one instance for one meaning, configuration, environment, aliases of endpoints."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pickle
import subprocess
import sys

import fsspec
import pytest
from fsspec.config import conf, set_conf_env, set_conf_files
from fsspec.registry import _registry
from fsspec.spec import AbstractFileSystem
from hypothesis import given
from hypothesis import strategies as st

from xds import base
from xds.filesystem import StorageFileSystem, XdsFileSystem
from xds.options import OPTIONS, aliases


@pytest.fixture
def configuration():
    """fsspec's configuration, as it was afterwards."""
    before = {name: dict(value) for name, value in conf.items()}
    yield conf
    conf.clear()
    conf.update(before)


# One instance for one meaning.

SPELLINGS = {
    "batch_size": ([None, "none", ""], [64, "64", 64.0, " 64 "]),
    "auto_mkdir": ([False, "false", "No", 0, "0"], [True, "true", "YES", 1, "on"]),
    "use_listings_cache": ([True, "true"], [False, "off"]),
    "timeout_s": ([60, 60.0, "60", "6e1"], [5, 5.0, "5"]),
    "fsync": (["none"], ["data"]),
    "cache_type": (["none"], ["readahead"]),
    "block_size": ([None, "None"], [1024, "1024"]),
    "require": ([None, {}, "{}"], [{"placement": "copy"}, '{"placement": "copy"}']),
    "max_paths": ([None], [5, "5"]),
    "listings_expiry_time": ([None], [5, "5.0"]),
    "asynchronous": ([False, "false"], [True, "true"]),
    "loop": ([None], []),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_of_an_option_gives_the_same_instance(name):
    defaults, others = SPELLINGS[name]
    plain = XdsFileSystem()
    for value in defaults:
        assert XdsFileSystem(**{name: value}) is plain, value
    made = {id(XdsFileSystem(**{name: value})) for value in others}
    assert made.isdisjoint({id(plain)})
    assert len(made) <= 1


def test_every_known_option_is_tried():
    assert set(OPTIONS) - set(SPELLINGS) == {"skip_instance_cache"}


@given(order=st.permutations(["batch_size", "fsync", "auto_mkdir", "unknown", "another"]))
def test_the_order_of_options_does_not_matter(order):
    values = {"batch_size": "7", "fsync": "full", "auto_mkdir": True, "unknown": 1, "another": "x"}
    first = XdsFileSystem(**values)
    assert XdsFileSystem(**{name: values[name] for name in order}) is first


def test_the_order_within_a_mapping_does_not_matter():
    one = XdsFileSystem(require={"posting": "host", "placement": "mapped"})
    assert XdsFileSystem(require={"placement": "mapped", "posting": "host"}) is one
    assert XdsFileSystem(require='{"placement": "mapped", "posting": "host"}') is one


def test_unknown_options_are_kept_as_they_are():
    fs = XdsFileSystem(unknown="7", port=4420)
    assert fs.storage_options == {"port": 4420, "unknown": "7"}
    assert XdsFileSystem(unknown=7, port=4420) is not fs
    assert pickle.loads(pickle.dumps(fs)) is fs
    assert AbstractFileSystem.from_json(fs.to_json()) is fs


def test_skip_instance_cache_is_honoured():
    plain = XdsFileSystem()
    for value in (True, "true", 1):
        assert XdsFileSystem(skip_instance_cache=value) is not plain
    assert XdsFileSystem(skip_instance_cache="false") is plain


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fsync", "maybe"), ("fsync", True), ("timeout_s", 0), ("timeout_s", "soon"), ("timeout_s", None),
        ("timeout_s", float("nan")), ("block_size", -1), ("block_size", 1.5), ("cache_type", "nonsense"),
        ("auto_mkdir", "perhaps"), ("auto_mkdir", []), ("require", "{"), ("require", 5), ("batch_size", [1]),
    ],
)  # fmt: skip
def test_values_that_cannot_be_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"xds:// option {name}="):
        XdsFileSystem(**{name: value})


def test_options_are_json_and_travel():
    options = {"require": {"placement": "mapped"}, "fsync": "full", "timeout_s": 5.0, "auto_mkdir": True}
    fs = XdsFileSystem(**options)
    assert json.loads(fs.to_json()).items() >= options.items()
    for copy in (pickle.loads(pickle.dumps(fs)), AbstractFileSystem.from_json(fs.to_json())):
        assert copy is fs
    other = AbstractFileSystem.from_dict({**fs.to_dict(), "asynchronous": True})
    assert (other.fsync, other.timeout_s, other.asynchronous) == ("full", 5.0, True)


def test_the_instance_cache_does_not_grow(tmp_path):
    (tmp_path / "f").write_bytes(b"x")
    before = len(XdsFileSystem._cache)
    for number in range(20):
        XdsFileSystem(timeout_s="60", batch_size=None, fsync="none")
        with fsspec.open(f"xds://{tmp_path}/f", mode="rb", timeout_s=60 if number % 2 else "60.0") as file:
            assert file.read() == b"x"
    assert len(XdsFileSystem._cache) <= before + 1


# What the options do.


def test_the_options_are_the_defaults_of_open(tmp_path, content):
    path = str(tmp_path / "f")
    fs = XdsFileSystem(cache_type="readahead", block_size="4096", auto_mkdir=True)
    fs.pipe_file(path, content)
    with fs.open(path) as file:
        assert (file.cache.name, file.blocksize) == ("readahead", 4096)
    with fs.open(path, cache_type="bytes", block_size=100) as file:
        assert (file.cache.name, file.blocksize) == ("bytes", 100)
    with fs.open(path, "ab") as file:
        assert file.blocksize == 4096


def test_require_and_timeout_are_the_defaults_of_reads_and_writes(tmp_path):
    path = str(tmp_path / "f")
    fs = XdsFileSystem(require={"placement": "copy"}, timeout_s=7)
    fs.pipe_file(path, b"bytes")  # no read or write of an array
    assert fs.cat_file(path) == b"bytes"
    with fs.open(path) as file:
        for call in (file.readinto, file.pread):
            with pytest.raises(OSError, match="cannot be met"):
                call(bytearray(5))
        assert file.readinto(bytearray(5), require={}) == 5
    with pytest.raises(OSError, match="cannot be met"):
        fs.readinto_ranges([path], [0], [5], [bytearray(5)])
    with fs.open(path, "ab") as file:
        for call in (file.writefrom,):
            with pytest.raises(OSError, match="cannot be met"):
                call(b"x")
    assert fs.transfer_options(None, None) == ({"placement": "copy"}, 7.0)
    assert fs.transfer_options({}, 1) == ({}, 1)


# Configuration files and environment.


def test_configuration_files_give_options(tmp_path, configuration):
    (tmp_path / "a.ini").write_text("[xds]\nauto_mkdir = yes\nblock_size = 8192\nrequire = {}\nbatch_size = none\n")
    (tmp_path / "b.json").write_text('{"xds": {"timeout_s": 9}}')
    set_conf_files(str(tmp_path), conf)
    fs = XdsFileSystem()
    assert (fs.auto_mkdir, fs.block_size, fs.timeout_s, fs.batch_size) == (True, 8192, 9.0, None)
    # What the caller says holds, also where it is the default of the package.
    other = XdsFileSystem(auto_mkdir=False, timeout_s=60)
    assert (other.auto_mkdir, other.block_size, other.timeout_s) == (False, 8192, 60.0)
    assert XdsFileSystem(timeout_s="60", auto_mkdir="no") is other
    assert XdsFileSystem(timeout_s=9, auto_mkdir=True) is fs
    assert pickle.loads(pickle.dumps(other)) is other


def test_a_wrong_value_in_the_configuration_is_named(configuration):
    conf["xds"] = {"fsync": "sometimes"}
    with pytest.raises(ValueError, match="option fsync='sometimes': must be one of none, data, full"):
        XdsFileSystem()


def test_the_environment_gives_options(configuration):
    environment = {
        "FSSPEC_XDS": '{"timeout_s": 8, "fsync": "data"}',
        "FSSPEC_XDS_BLOCK_SIZE": "64",
        "FSSPEC_XDS_FSYNC": "full",
    }
    set_conf_env(conf, environment)
    fs = XdsFileSystem()
    assert (fs.timeout_s, fs.fsync, fs.block_size) == (8.0, "full", 64)


def test_the_environment_of_a_new_process():
    program = "import fsspec; fs = fsspec.filesystem('xds'); print(fs.fsync, fs.block_size, fs.auto_mkdir)"
    environment = {
        **os.environ,
        "FSSPEC_XDS": '{"fsync": "data"}',
        "FSSPEC_XDS_BLOCK_SIZE": "64",
        "FSSPEC_XDS_AUTO_MKDIR": "true",
    }
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["data", "64", "True"]


# Aliases of endpoints.


class TinyBackend:
    """One file an endpoint, whose content is what belongs to the endpoint."""

    def __init__(self, endpoint):
        self.endpoint = endpoint

    def info(self, path):
        host, _, name = path.partition("/")
        if name != "options":
            raise FileNotFoundError(path)
        size = len(json.dumps(self.endpoint(host), sort_keys=True))
        return {"name": path, "type": "file", "size": size, "mtime": 0.0, "created": 0.0, "identity": (0, 0, size, 0)}

    def ls(self, path):
        return [self.info(path)]

    def open(self, path):
        self.info(path)
        return TinyHandle(path, json.dumps(self.endpoint(path.partition("/")[0]), sort_keys=True).encode())

    def transfer(self, handles, **kwargs):
        raise NotImplementedError


class TinyHandle:
    def __init__(self, path, data):
        self.path, self.data, self.nbytes, self.identity = path, data, len(data), (0, 0, len(data), 0)

    def pread_into(self, view, offset):
        data = self.data[offset : offset + len(view)]
        view[: len(data)] = data
        return len(data)

    def check_unchanged(self):
        pass

    def close(self):
        pass


class TinyFileSystem(StorageFileSystem):
    protocol = "tinyxds"
    authority = True


@pytest.fixture
def tiny(configuration, monkeypatch):
    """A protocol whose URLs name a host, as an installed backend would bring it."""
    found = importlib.metadata.EntryPoint("tinyxds", f"{__name__}:TinyBackend", "xds.backends")
    monkeypatch.setattr(type(found), "load", lambda self: TinyBackend)
    monkeypatch.setattr(base, "_entry_points", lambda protocol: [found])
    base.backend_class.cache_clear()
    fsspec.register_implementation("tinyxds", TinyFileSystem, clobber=True)
    yield TinyFileSystem
    base.backend_class.cache_clear()
    TinyFileSystem.clear_instance_cache()
    _registry.pop("tinyxds", None)


def read(url):
    with fsspec.open(url) as file:
        return json.loads(file.read())


def test_an_alias_stands_for_an_endpoint(tiny, configuration):
    conf["tinyxds"] = {"endpoints": {"fast": {"address": "192.0.2.1", "port": 4420}, "plain": {"port": 1}}}
    assert read("tinyxds://fast/options") == {"address": "192.0.2.1", "port": 4420}
    assert read("tinyxds://plain/options") == {"address": "plain", "port": 1}
    assert read("tinyxds://storage.example/options") == {"address": "storage.example"}
    fs = fsspec.filesystem("tinyxds")
    assert fs._strip_protocol("tinyxds://fast//options") == "fast/options"
    assert fs.unstrip_protocol("fast/options") == "tinyxds://fast/options"
    # A change of the configuration is seen by instances that are there already.
    conf["tinyxds"]["endpoints"]["fast"] = {"address": "192.0.2.2"}
    assert read("tinyxds://fast/options") == {"address": "192.0.2.2"}


def test_aliases_as_text_and_from_the_environment(tiny, configuration, tmp_path):
    (tmp_path / "a.ini").write_text('[tinyxds]\nendpoints = {"fast": {"address": "192.0.2.1"}}\n')
    set_conf_files(str(tmp_path), conf)
    assert read("tinyxds://fast/options") == {"address": "192.0.2.1"}
    set_conf_env(conf, {"FSSPEC_TINYXDS_ENDPOINTS": '{"other": {"address": "192.0.2.3"}}'})
    assert read("tinyxds://other/options") == {"address": "192.0.2.3"}


def test_aliases_stay_out_of_instances_pickles_and_json(tiny, configuration):
    before = fsspec.filesystem("tinyxds")
    conf["tinyxds"] = {"endpoints": {"fast": {"secret": "hush"}}}
    fs = fsspec.filesystem("tinyxds")
    assert fs is before
    assert "hush" not in fs.to_json() + repr(fs.storage_options) + repr(fs)
    assert b"hush" not in pickle.dumps(fs)
    with pytest.raises(ValueError, match="no argument"):
        TinyFileSystem(endpoints={"fast": {}})


@pytest.mark.parametrize("value", [5, "{", {"a": 1}, {"a/b": {}}, {"": {}}])
def test_aliases_that_cannot_be(configuration, value):
    conf["tinyxds"] = {"endpoints": value}
    with pytest.raises(ValueError, match="configuration of tinyxds, endpoints"):
        aliases("tinyxds")


def test_a_backend_that_only_reads_refuses_all_writes(tiny):
    fs = fsspec.filesystem("tinyxds")
    for call in (lambda: fs.pipe_file("h/options", b""), lambda: fs.rm("h/options"), lambda: fs.open("h/x", "wb")):
        with pytest.raises(OSError, match="tinyxds:// only reads"):
            call()
