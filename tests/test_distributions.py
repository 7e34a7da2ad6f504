from __future__ import annotations

import importlib.metadata

import pytest

from xds import distributions
from xds.errors import XdsError


def make_distribution(folder, name, record, top_level=None):
    info = folder / f"{name.replace('-', '_')}-1.2.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2.3\n")
    (info / "RECORD").write_text(record)
    if top_level is not None:
        (info / "top_level.txt").write_text(top_level)


def test_no_clash_here():
    assert distributions.clash() is None


@pytest.mark.parametrize(
    ("name", "record", "top_level", "package"),
    [
        ("nvmeof", "nvmeof/__init__.py,,\n", None, "nvmeof"),
        ("rdma-thing", "other/a.py,,\nnvmeof/queue.py,sha256=x,1\n", None, "nvmeof"),
        ("old-xds", "", "xds\nother\n", "xds"),
        ("one-module", "xds.py,,\n", None, "xds"),
        ("nfs", "nfsrdma/__init__.py,,\n", None, "nfsrdma"),
    ],
)
def test_a_foreign_owner_of_our_packages_is_named(tmp_path, monkeypatch, name, record, top_level, package):
    make_distribution(tmp_path, name, record, top_level)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = distributions.clash()
    assert found is not None
    assert f"pip uninstall {name}" in found
    assert repr(package) in found
    assert "1.2.3" in found


def test_neighbours_with_like_names_are_no_clash(tmp_path, monkeypatch):
    make_distribution(tmp_path, "xdsx", "xdsx/__init__.py,,\nxds_tools/a.py,,\nlib/xds/a.py,,\n", "xdsx\n")
    make_distribution(tmp_path, "XPU_Direct.Storage", "xds/__init__.py,,\n", "xds\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert distributions.clash() is None


def test_a_backend_that_cannot_be_loaded_names_the_clash(tmp_path, monkeypatch):
    from xds.filesystem import StorageFileSystem

    make_distribution(tmp_path, "nvmeof", "nvmeof/__init__.py,,\n")
    info = tmp_path / "nvmeof-1.2.3.dist-info"
    (info / "entry_points.txt").write_text("[xds.backends]\nfaraway = nvmeof_of_another.backend:Backend\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert importlib.metadata.entry_points(group="xds.backends", name="faraway")

    class FarawayFileSystem(StorageFileSystem):
        protocol = "faraway"
        authority = True

    with pytest.raises(XdsError, match="pip uninstall nvmeof"):
        FarawayFileSystem(skip_instance_cache=True).info("faraway://h/a")


def test_a_protocol_without_a_backend_says_so():
    from xds.filesystem import StorageFileSystem

    class NowhereFileSystem(StorageFileSystem):
        protocol = "nowhere"

    with pytest.raises(XdsError, match="no backend for nowhere://"):
        NowhereFileSystem(skip_instance_cache=True).info("/a")
