"""The doctor: every part missing, limited and there, with a fake root for /proc, /sys and /dev."""

from __future__ import annotations

import ctypes
import errno
import importlib.metadata
import json
import os
import resource
import subprocess

import pytest

from xds import distributions, doctor, native
from xds.doctor import Finding, examine, gpu, machine, software


def put(root, path, text):
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def only(findings):
    (finding,) = findings
    return finding


@pytest.fixture
def no_driver(monkeypatch):
    monkeypatch.setattr(gpu, "driver", lambda: gpu.Driver(fault="libcuda.so.1 is not installed"))


@pytest.fixture
def one_gpu(monkeypatch):
    device = gpu.Device("NVIDIA H200", 139 << 30, "9.0")
    monkeypatch.setattr(gpu, "driver", lambda: gpu.Driver((13, 0), (device,)))


def versions(monkeypatch, **known):
    def version(name):
        if name.replace("-", "_") not in known:
            raise importlib.metadata.PackageNotFoundError(name)
        return known[name.replace("-", "_")]

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_everything_is_looked_at_on_this_machine():
    findings = examine()
    names = [finding.name for finding in findings]
    assert names == [name for name, _ in doctor.checks()]
    assert not [finding for finding in findings if "could not be examined" in finding.what]
    for finding in findings:
        assert finding.state in ("ok", "limited", "absent")
        assert finding.what
        if finding.state != "ok":
            assert finding.cost
            assert finding.action
    json.dumps([finding.as_dict() for finding in findings])


def test_an_empty_root_is_no_trouble(tmp_path, no_driver):
    findings = examine(tmp_path)
    assert len(findings) == len(doctor.checks())
    assert not [finding for finding in findings if "could not be examined" in finding.what]
    by_name = {finding.name: finding for finding in findings}
    assert by_name["RDMA devices"].state == "absent"
    assert by_name["/dev/shm"].state == "absent"
    assert by_name["pages"].state in ("ok", "limited")


def test_a_root_of_garbage_is_no_trouble(tmp_path, no_driver):
    noise = "\x00\ud7ff: 1 : 2\nmax max max\n-1 -1\n" * 3
    for path in (
        "proc/self/cgroup",
        "proc/meminfo",
        "proc/sys/kernel/io_uring_disabled",
        "proc/driver/nvidia-fs/version",
        "sys/fs/cgroup/cpu.max",
        "sys/class/infiniband/mlx5_0/ports/1/state",
        "sys/module/nvidia/version",
        "dev/shm/x",
    ):
        put(tmp_path, path, noise)
    findings = examine(tmp_path)
    assert len(findings) == len(doctor.checks())
    assert not [finding for finding in findings if "could not be examined" in finding.what]


def test_a_check_that_breaks_becomes_a_finding(monkeypatch):
    def broken(root):
        raise RuntimeError("boom")

    monkeypatch.setattr(doctor, "checks", lambda: [("thing", broken), ("pages", machine.pages)])
    first, second = examine()
    assert first.state == "limited"
    assert "boom" in first.what
    assert second.name == "pages"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        # The tightest limit of the whole line of parents counts.
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000",
                "sys/fs/cgroup/a/cpu.max": "50000 100000",
                "sys/fs/cgroup/cpu.max": "400000 100000",
            },
            0.5,
        ),
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/job\n3:memory:/job\n",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "200000",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "50000",
            },
            4.0,
        ),
        (
            {
                "proc/self/cgroup": "5:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            None,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "100000 0\n"}, None),
    ],
)
def test_cpu_quota(tmp_path, files, quota):
    for path, text in files.items():
        put(tmp_path, path, text)
    assert machine.cpu_quota(tmp_path) == quota


def test_cpu_says_which_limit_holds(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    assert only(machine.cpu(tmp_path)).state == "ok"
    put(tmp_path, "proc/self/cgroup", "0::/\n")
    put(tmp_path, "sys/fs/cgroup/cpu.max", "250000 100000\n")
    finding = only(machine.cpu(tmp_path))
    assert finding.state == "limited"
    assert finding.what.startswith("2.5 of 16 CPUs")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert only(machine.cpu(tmp_path)).what == "2 CPUs, no quota"


@pytest.mark.parametrize(
    ("code", "disabled", "state", "word"),
    [
        (0, None, "ok", "allowed"),
        (errno.ENOSYS, None, "absent", "kernel has none"),
        (errno.EPERM, "2", "absent", "io_uring_disabled is 2"),
        (errno.EPERM, "0", "absent", "EPERM"),
        (errno.EPERM, None, "absent", "EPERM"),
        (9999, None, "absent", "9999"),
    ],
)
def test_io_uring(tmp_path, monkeypatch, code, disabled, state, word):
    monkeypatch.setattr(machine, "io_uring_setup_errno", lambda: code)
    if disabled is not None:
        put(tmp_path, "proc/sys/kernel/io_uring_disabled", disabled + "\n")
    finding = only(machine.io_uring(tmp_path))
    assert finding.state == state
    assert word in finding.what


def test_the_io_uring_probe_leaves_no_descriptor_behind():
    before = len(os.listdir("/proc/self/fd"))
    codes = {machine.io_uring_setup_errno() for _ in range(5)}
    assert len(os.listdir("/proc/self/fd")) == before
    assert len(codes) == 1


@pytest.mark.parametrize(
    ("soft", "hard", "state", "word"),
    [
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, "ok", "no limit"),
        (64 << 20, 64 << 20, "ok", "64 MiB"),
        (64 << 10, 64 << 10, "limited", "64 KiB"),
        (64 << 10, resource.RLIM_INFINITY, "limited", "64 KiB"),
    ],
)
def test_memlock(tmp_path, monkeypatch, soft, hard, state, word):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
    finding = only(machine.memlock(tmp_path))
    assert finding.state == state
    assert word in finding.what
    if soft != hard:
        assert "the hard one allows it" in finding.action


def test_rdma_devices_are_listed_with_their_state(tmp_path):
    put(tmp_path, "sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n")
    put(tmp_path, "sys/class/infiniband/mlx5_0/ports/1/link_layer", "Ethernet\n")
    (tmp_path / "sys/class/infiniband/rxe0").mkdir()
    finding = only(machine.rdma(tmp_path))
    assert finding.state == "ok"
    assert "mlx5_0 (Ethernet, port 1 ACTIVE)" in finding.what
    assert "rxe0 (unknown link, port 1 unknown)" in finding.what


def test_a_small_shared_memory_is_a_limit(tmp_path, monkeypatch):
    (tmp_path / "dev/shm").mkdir(parents=True)
    real = os.statvfs(tmp_path / "dev/shm")
    fields = list(real)
    fields[1:5] = [4096, (64 << 20) // 4096, 10, 10]
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))
    finding = only(machine.shared_memory(tmp_path))
    assert finding.state == "limited"
    assert "64 MiB" in finding.what


def test_pages(tmp_path, monkeypatch):
    put(tmp_path, "proc/meminfo", "HugePages_Total:      12\nHugepagesize:       2048 kB\n")
    assert "12 huge pages of 2048 KiB" in only(machine.pages(tmp_path)).what
    monkeypatch.setattr(os, "sysconf", lambda name: 65536)
    finding = only(machine.pages(tmp_path))
    assert finding.state == "limited"
    assert finding.what.startswith("64 KiB")


def test_a_missing_driver_is_told_apart_from_one_without_gpus(tmp_path):
    assert "not installed" in gpu.driver.__wrapped__("libcuda-of-nowhere.so.1").fault


FAKE_CUDA = r"""
#include <string.h>
int cuDriverGetVersion(int *v) { *v = 13000; return 0; }
int cuInit(unsigned f) { return INIT; }
int cuGetErrorName(int c, const char **t) { *t = "CUDA_ERROR_NO_DEVICE"; return 0; }
int cuDeviceGetCount(int *n) { *n = COUNT; return 0; }
int cuDeviceGet(int *d, int i) { *d = i; return 0; }
int cuDeviceGetName(char *t, int n, int d) { strncpy(t, "Fake GPU", n); return 0; }
int cuDeviceTotalMem_v2(unsigned long *n, int d) { *n = 5ul << 30; return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) { *v = a == 75 ? 9 : 0; return 0; }
"""


@pytest.mark.parametrize(
    ("init", "count", "expected"),
    [
        (0, 2, gpu.Driver((13, 0), (gpu.Device("Fake GPU", 5 << 30, "9.0"),) * 2)),
        (0, 0, gpu.Driver((13, 0), (), "the driver shows no GPU")),
        (100, 1, gpu.Driver((13, 0), (), "cuInit failed: CUDA_ERROR_NO_DEVICE")),
    ],
)
def test_the_driver_is_asked_rightly(tmp_path, init, count, expected):
    source, library = tmp_path / "cuda.c", tmp_path / f"libcuda-{init}-{count}.so"
    source.write_text(FAKE_CUDA)
    command = ["cc", "-shared", "-fPIC", f"-DINIT={init}", f"-DCOUNT={count}", str(source), "-o", str(library)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no C compiler")
    assert gpu.driver.__wrapped__(str(library)) == expected


def test_gpu_findings(tmp_path, monkeypatch, one_gpu):
    put(tmp_path, "sys/module/nvidia/version", "580.159.04\n")
    finding = only(gpu.gpu(tmp_path))
    assert finding.state == "ok"
    assert finding.what == "cuda:0 NVIDIA H200, 139 GiB, compute 9.0 (driver 580.159.04, CUDA 13.0)"
    old = gpu.Driver((11, 8), (gpu.Device("Old", 1 << 30, "7.0"),))
    monkeypatch.setattr(gpu, "driver", lambda: old)
    assert only(gpu.gpu(tmp_path)).state == "limited"
    monkeypatch.setattr(gpu, "driver", lambda: gpu.Driver((13, 0), (), "the driver shows no GPU"))
    finding = only(gpu.gpu(tmp_path))
    assert finding.state == "absent"
    assert "CUDA_VISIBLE_DEVICES" in finding.action


def test_cupy_for_another_driver_is_a_limit(tmp_path, monkeypatch, one_gpu):
    versions(monkeypatch, cupy_cuda13x="14.0.0")
    assert only(gpu.cupy(tmp_path)) == Finding("CuPy", "ok", "cupy-cuda13x 14.0.0")
    monkeypatch.setattr(gpu, "driver", lambda: gpu.Driver((12, 4), (gpu.Device("G", 1, "8.0"),)))
    finding = only(gpu.cupy(tmp_path))
    assert finding.state == "limited"
    assert "pip install cupy-cuda12x" in finding.action


def test_the_cupy_that_is_named_fits_the_driver(tmp_path, monkeypatch, one_gpu):
    versions(monkeypatch)
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None)
    assert "pip install cupy-cuda13x" in only(gpu.cupy(tmp_path)).action
    monkeypatch.setattr(gpu, "driver", lambda: gpu.Driver((12, 4), (gpu.Device("G", 1, "8.0"),)))
    assert "pip install cupy-cuda12x" in only(gpu.cupy(tmp_path)).action


def test_torch(tmp_path, monkeypatch, one_gpu):
    versions(monkeypatch)
    assert only(gpu.torch(tmp_path)).state == "absent"
    assert only(gpu.torch(tmp_path)).action.startswith("pip install torch")
    versions(monkeypatch, torch="2.13.0+cpu")
    assert only(gpu.torch(tmp_path)).state == "limited"
    versions(monkeypatch, torch="2.13.0")
    assert only(gpu.torch(tmp_path)).state == "ok"


@pytest.mark.parametrize(
    ("library", "module", "state", "word"),
    [
        (None, False, "absent", "not installed"),
        (None, True, "absent", "nvidia-fs is loaded"),
        ("libcufile.so.0", False, "limited", "compatibility mode, which is not used"),
        ("libcufile.so.0", True, "limited", "is loaded"),
    ],
)
def test_cufile(tmp_path, monkeypatch, one_gpu, library, module, state, word):
    monkeypatch.setattr(gpu, "cufile_library", lambda: library)
    if module:
        put(tmp_path, "proc/driver/nvidia-fs/version", "version: 2.22\n")
    finding = only(gpu.cufile(tmp_path))
    assert finding.state == state
    assert word in finding.what


@pytest.mark.parametrize(("library", "state"), [(None, "absent"), ("libcufile.so.0", "limited")])
def test_without_a_gpu_cufile_costs_nothing(tmp_path, monkeypatch, library, state):
    monkeypatch.setattr(gpu, "driver", lambda: gpu.Driver(None, (), "libcuda.so.1 is not installed"))
    monkeypatch.setattr(gpu, "cufile_library", lambda: library)
    finding = only(gpu.cufile(tmp_path))
    assert (finding.state, finding.cost, finding.action) == (state, "nothing: there is no GPU", "nothing")


def test_cufile_is_found_in_a_wheel(tmp_path, monkeypatch):
    put(tmp_path, "nvidia/cu13/lib/libcufile.so.0", "")
    monkeypatch.setattr(gpu.sys, "path", [str(tmp_path)])
    assert gpu.cufile_library() == tmp_path / "nvidia/cu13/lib/libcufile.so.0"


def test_a_missing_core_is_a_reason_to_fail(tmp_path, monkeypatch):
    def missing():
        raise ImportError("the native core libxds_native.so is missing")

    monkeypatch.setattr(native, "library", missing)
    finding = only(software.native_core(tmp_path))
    assert finding.state == "absent"
    assert finding.required


def test_the_core_that_is_there_is_named(tmp_path):
    finding = only(software.native_core(tmp_path))
    assert finding.state == "ok"
    assert "libxds_native.so" in finding.what
    assert isinstance(native.library(), ctypes.CDLL)


def test_a_clash_is_told(tmp_path, monkeypatch):
    assert only(software.clash(tmp_path)).state == "ok"
    monkeypatch.setattr(distributions, "clash", lambda: "the distribution 'nvmeof' installs the package 'nvmeof'")
    finding = only(software.clash(tmp_path))
    assert finding.state == "limited"
    assert "nvmeof" in finding.what


def test_missing_packages_are_named(tmp_path, monkeypatch):
    versions(monkeypatch, xpu_direct_storage="0.1.0", fsspec="1", numpy="2")
    finding = only(software.packages(tmp_path))
    assert finding.state == "absent"
    assert finding.required
    assert finding.action == "pip install ml-dtypes"


@pytest.mark.parametrize(("version", "state"), [((3, 10), "limited"), ((3, 12), "ok"), ((3, 14), "limited")])
def test_python_versions(tmp_path, monkeypatch, version, state):
    monkeypatch.setattr(software.sys, "version_info", (*version, 0, "final", 0))
    assert only(software.python(tmp_path)).state == state
