"""cuFile is used where a test read proved real DMA, and nowhere else: a fake libcufile over the fake CUDA driver.

No machine at hand has nvidia-fs, so there is no twin on real hardware: there, the refusal alone is what can be seen.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "gpu"

SCRIPT = """
import ctypes, json, os, sys
import numpy as np
from xds.engine.mover import MoverTransfer
from xds.errors import XdsError
from xds.plan import segments

path, require_dma = sys.argv[1], sys.argv[2] == "require"
fake = ctypes.CDLL(os.environ["XDS_CUDA_LIBRARY"])
fake.cuCtxPushCurrent_v2(ctypes.c_void_p(1))
content = np.fromfile(path, np.uint8)
size = len(content)
address = ctypes.c_uint64()
assert fake.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)) == 0
fd = os.open(path, os.O_RDONLY)
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
batch = segments(2)
batch[0] = (0, 1_000_001, address.value, 0, 0)
batch[1] = (1_000_001, size - 1_000_001, address.value + 1_000_001, 0, 0)
fake.fake_cuda_busy(None, ctypes.c_uint64(20_000))  # earlier work on the caller's stream
try:
    transfer = MoverTransfer([fd], [path], device=0, require_dma=require_dma)
    transfer.add(batch, stream=0)
    report = transfer.wait()
except XdsError as error:
    print(json.dumps({"error": type(error).__name__, "errno": error.errno, "text": str(error)}))
else:
    got = np.empty(size, np.uint8)
    assert fake.cuMemcpyDtoH_v2(ctypes.c_void_p(got.ctypes.data), address, ctypes.c_size_t(size)) == 0
    assert (got == content).all()
    print(json.dumps(report.as_dict()))
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("fake")
    for name in ("fake_cuda", "fake_cufile"):
        command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", f"{HERE / name}.cpp", "-ldl"]
        subprocess.run([*command, "-o", f"{folder / name}.so"], check=True)
    return folder


@pytest.fixture
def cold_file(tmp_path):
    path = tmp_path / "cold.bin"
    path.write_bytes(os.urandom(5_000_123))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        try:
            os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
        except OSError:
            pytest.skip("the temporary folder's file system refuses O_DIRECT")
    return path


def run(libraries, path, tmp_path, mode, require="any"):
    stats = tmp_path / "stats"
    if mode != "no module":
        stats.write_text("GDS Version: 1.0\nReads\t\t: n=0 ok=0 err=0\n")
    environment = {
        **os.environ,
        "XDS_CUDA_LIBRARY": str(libraries / "fake_cuda.so"),
        "XDS_CUFILE_LIBRARY": str(libraries / ("fake_cufile.so" if mode != "no library" else "missing.so")),
        "XDS_NVIDIA_FS_STATS": str(stats),
        "FAKE_CUFILE_MODE": mode,
        # Whatever the page cache holds: only ways that ask the device.
        "XDS_MOVER_FORBID": "pread,mapped",
    }
    command = [sys.executable, "-c", SCRIPT, str(path), require]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("require", ["any", "require"])
def test_used_where_dma_is_proved(libraries, cold_file, tmp_path, require):
    report = run(libraries, cold_file, tmp_path, "dma", require)
    assert report["method"] == {"cufile": 5_000_123}
    assert report["placement"] == {"dma": 5_000_123}
    assert report["notes"] == []


def test_short_answers_are_continued(libraries, cold_file, tmp_path):
    report = run(libraries, cold_file, tmp_path, "short")
    assert report["placement"] == {"dma": 5_000_123}
    assert report["retries"] > 900


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("compat", "compatibility mode"),
        ("wrong", "other bytes"),
        ("no module", "nvidia-fs is not loaded"),
        ("no library", "missing.so"),
    ],
)
def test_never_used_unproved(libraries, cold_file, tmp_path, mode, reason):
    report = run(libraries, cold_file, tmp_path, mode)
    assert "cufile" not in report["method"]
    assert report["placement"] == {"copy": 5_000_123}
    noted = any("not real DMA" in note for note in report["notes"])
    assert noted == (mode != "no module")
    refused = run(libraries, cold_file, tmp_path, mode, "require")
    assert refused["error"] == "RequirementError"
    assert reason in refused["text"]
    assert str(cold_file) in refused["text"]


def test_an_error_of_cufile_is_the_reads_error(libraries, cold_file, tmp_path):
    error = run(libraries, cold_file, tmp_path, "error")
    assert error["error"] == "XdsError"
    assert error["errno"] == 5
    assert str(cold_file) in error["text"]
    assert "offset" in error["text"]
