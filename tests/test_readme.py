"""Runs the Python blocks of the README and the guides as they stand, and checks the links."""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest

import xds

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: What a page may show and the package does not need.
OPTIONAL = {"pandas", "pyarrow", "torch"}
#: The folder that the pages read from.
DATA = "/data/"


def write_checkpoint(path, tensors):
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, array in tensors.items():
        begin = len(data)
        data += array.tobytes()
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.fixture
def data(tmp_path):
    tensors = {
        "embedding": np.arange(64 * 32, dtype=np.float32).reshape(64, 32),
        "layers.0.weight": np.ones((32, 32), dtype=np.float32),
        "layers.0.bias": np.zeros(32, dtype=np.float32),
    }
    write_checkpoint(tmp_path / "model.safetensors", tensors)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "broken.safetensors").write_bytes(whole[: len(whole) // 2])
    return tmp_path


def pages_with_code():
    pages = [page for page in PAGES if BLOCK.search((ROOT / page).read_text(encoding="utf-8"))]
    # Tools warn of what is theirs.
    theirs = pytest.mark.filterwarnings("ignore")
    return [pytest.param(page, marks=theirs) if page.startswith("docs/tools/") else page for page in pages]


@pytest.mark.parametrize("page", pages_with_code())
def test_the_code_of_a_page_runs_as_it_stands(page, data, monkeypatch):
    monkeypatch.chdir(data)
    blocks = BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    if page.startswith("docs/tools/"):
        for module in re.findall(r"^(?:import|from) (\w+)", "\n".join(blocks), re.MULTILINE):
            pytest.importorskip(module, reason=f"{module} is not installed")
    names = {"xds": xds}
    if page in ("README.md", "docs/quickstart.md"):
        names = {}
    missing = set()
    for number, block in enumerate(blocks):
        code = compile(
            block.replace(DATA, f"{data}/").replace('"/data"', f'"{data}"'), f"{page}, block {number}", "exec"
        )
        try:
            exec(code, names)
        except ModuleNotFoundError as error:
            if error.name not in OPTIONAL:
                raise
            missing.add(error.name)
    assert names, page
    if missing:
        pytest.skip(f"{page} shows {', '.join(sorted(missing))} too, which is not installed; all else ran")


def test_the_first_page_needs_no_files_but_its_own():
    assert DATA not in (ROOT / "docs/quickstart.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_code_fits_on_the_page(page):
    blocks = re.findall(r"^```.*?^```", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert [line for block in blocks for line in block.splitlines() if len(line) > 88] == []


def test_the_readme_has_the_first_three_things_to_do():
    assert len(BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))) >= 3


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = [target for target in re.findall(r"\]\(([^)#\s]+)\)", text) if "://" not in target]
    missing = [target for target in targets if not ((ROOT / page).parent / target).exists()]
    assert missing == []


def test_the_stages_are_listed_without_an_environment(tmp_path):
    source = (ROOT / "tools/checks.py").read_text(encoding="utf-8")
    (tmp_path / "tools").mkdir()
    for name in ("test", "_bootstrap.sh", "checks.py"):
        shutil.copy(ROOT / "tools" / name, tmp_path / "tools")
    done = subprocess.run([tmp_path / "tools/test", "--list"], capture_output=True, text=True, check=True)
    stages = done.stdout.split()
    assert {"install", "lint", "docs", "unit"} <= set(stages)
    assert all(f'"{stage}": {stage},' in source for stage in stages)
    assert [path.name for path in tmp_path.iterdir()] == ["tools"]


def test_the_demo_and_the_tests_named_in_the_readme_can_be_run():
    for name in ("demo", "test", "build-wheel"):
        assert (ROOT / "tools" / name).stat().st_mode & 0o111, name
