"""The tests in ``gpu`` on a machine without one: against a driver of our own, in a process of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
#: So many at least: fewer means that something was not collected.
EXPECTED = 80


@pytest.mark.timeout(600)
def test_the_gpu_tests_pass_on_the_fake_driver(tmp_path):
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    library = tmp_path / "libfake_cuda.so"
    source = FOLDER / "gpu/fake_cuda.cpp"
    subprocess.run([compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", source, "-o", library], check=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("XDS_", "PYTEST_"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", FOLDER / "gpu", "-q", "-p", "no:cacheprovider", "-p", "no:randomly"],
        cwd=FOLDER.parent,
        env={**environment, "XDS_CUDA_LIBRARY": str(library)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-4000:]
    summary = done.stdout.splitlines()[-1]
    assert "skipped" not in summary, done.stdout
    passed = re.search(r"(\d+) passed", summary)
    assert passed is not None
    assert int(passed.group(1)) >= EXPECTED
