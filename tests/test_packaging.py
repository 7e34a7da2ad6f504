"""The distribution: entry points, metadata, typing marker, what an import pulls in, layers."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

import xds

DISTRIBUTION = "xpu-direct-storage"


def entries(group):
    found = [entry for entry in importlib.metadata.entry_points(group=group) if entry.dist.name == DISTRIBUTION]
    assert found, f"no entry points in {group}: install the package again"
    return found


@pytest.mark.parametrize("group", ["fsspec.specs", "xds.backends", "xds.commands"])
def test_every_entry_point_leads_to_something(group):
    for entry in entries(group):
        assert callable(entry.load()), entry


def test_fsspec_finds_the_protocol_by_itself():
    code = "import fsspec; print(type(fsspec.filesystem('xds')).__name__)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "XdsFileSystem"


def test_the_commands_are_those_that_the_documentation_names():
    assert {entry.name for entry in entries("xds.commands")} == {
        *("ls", "stat", "cat", "cp", "find", "du", "load", "doctor")
    }


def test_metadata():
    metadata = importlib.metadata.metadata(DISTRIBUTION)
    assert metadata["Name"] == DISTRIBUTION
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert set(metadata.get_all("Provides-Extra")) >= {"cuda12", "cuda13", "torch", "bench", "dev"}
    assert xds.__version__ == metadata["Version"]


def test_the_base_install_is_small_and_brings_no_framework():
    base = [line for line in importlib.metadata.requires(DISTRIBUTION) if "extra ==" not in line]
    names = {line.split(">")[0].split("<")[0].split("=")[0].strip() for line in base}
    assert names == {"fsspec", "numpy", "ml-dtypes", "typer", "rich"}


def test_the_types_are_for_users_too():
    assert (Path(xds.__file__).parent / "py.typed").is_file()


def test_import_pulls_in_nothing_heavy():
    code = (
        "import sys, json, fsspec, numpy; before = set(sys.modules); import xds;"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    new = json.loads(done.stdout)
    assert "xds" in new
    heavy = {"cupy", "torch", "jax", "typer", "rich", "ml_dtypes", "xds.native", "asyncio", "ctypes"}
    assert {name.partition(".")[0] for name in new} & (heavy - {"xds.native"}) == set()
    assert "xds.native" not in new


def test_every_public_name_is_there():
    for name in xds.__all__:
        assert getattr(xds, name) is not None, name
    with pytest.raises(AttributeError, match="nothing_like_that"):
        xds.nothing_like_that


def test_no_module_of_the_package_needs_a_framework_to_be_imported():
    code = (
        "import sys, pkgutil, importlib\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('cupy', 'torch', 'jax', 'safetensors'):\n"
        "            raise ImportError(f'{name} was imported')\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "import xds\n"
        "names = [m.name for m in pkgutil.walk_packages(xds.__path__, 'xds.')]\n"
        "names = [name for name in names if not name.endswith(('__main__', 'libxds_native'))]\n"
        "needing = ('xds.interop.cupy_arrays', 'xds.interop.torch_tensors', 'xds.interop.jax_arrays')\n"
        "for name in names:\n"
        "    if name not in needing: importlib.import_module(name)\n"
        "print(len(names))\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10
