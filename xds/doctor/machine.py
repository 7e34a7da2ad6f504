"""CPU quota, io_uring, locked memory, RDMA devices, shared memory, pages. Layer: top, part of the doctor."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
from collections.abc import Sequence
from pathlib import Path

from xds.doctor import Finding, read_text

#: The most pinned memory one process uses.
RING_NBYTES = 64 << 20

_SYS_IO_URING_SETUP = 425
_IO_URING_PARAMS_NBYTES = 120


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.1f} GiB" if nbytes >= 1 << 30 else f"{nbytes / (1 << 20):.0f} MiB"


def _lineage(mount: Path, path: str) -> list[Path]:
    """Return the cgroup's folder and its parents up to ``mount``: any of them may hold a tighter limit."""
    folder = mount / path.strip("/")
    return [folder, *[parent for parent in folder.parents if parent.is_relative_to(mount)]]


def _quota_of(folder: Path) -> float | None:
    unified = read_text(folder / "cpu.max")
    if unified is not None:
        quota, _, period = unified.partition(" ")
    else:
        quota = read_text(folder / "cpu.cfs_quota_us") or ""
        period = read_text(folder / "cpu.cfs_period_us") or ""
    try:
        cpus = int(quota) / int(period or "100000")
    except (ValueError, ZeroDivisionError):
        return None
    return cpus if cpus > 0 else None


def cpu_quota(root: Path) -> float | None:
    """Return the CPUs that the cgroup (v2 or v1) of this process may use, or ``None`` if there is no limit."""
    quotas: list[float] = []
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            mounts = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
        elif "cpu" in controllers.split(","):
            mounts = [root / "sys/fs/cgroup/cpu", root / "sys/fs/cgroup/cpu,cpuacct"]
        else:
            continue
        for mount in mounts:
            quotas += [quota for folder in _lineage(mount, path) if (quota := _quota_of(folder)) is not None]
    return min(quotas, default=None)


def cpu(root: Path) -> Sequence[Finding]:
    """CPUs that this process may run on, and the quota of its cgroup."""
    allowed = len(os.sched_getaffinity(0))
    quota = cpu_quota(root)
    if quota is not None and quota < allowed:
        return [
            Finding(
                "CPU",
                "limited",
                f"{quota:g} of {allowed} CPUs: the cgroup has a quota",
                "fewer threads copy: a GPU's full rate takes 8 or more",
                "raise the CPU limit of the container or the slice",
            )
        ]
    if allowed < 8:
        return [
            Finding(
                "CPU",
                "limited",
                f"{allowed} CPUs, no quota",
                "reads from the page cache stay below a GPU's full rate, which takes 8 or more",
                "give the process more CPUs",
            )
        ]
    return [Finding("CPU", "ok", f"{allowed} CPUs, no quota")]


def io_uring_setup_errno() -> int:
    """Return 0 if the kernel lets this process make an io_uring, else the errno."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    parameters = ctypes.create_string_buffer(_IO_URING_PARAMS_NBYTES)
    descriptor = libc.syscall(ctypes.c_long(_SYS_IO_URING_SETUP), ctypes.c_uint(1), parameters)
    if descriptor < 0:
        return ctypes.get_errno()
    os.close(descriptor)
    return 0


def io_uring(root: Path) -> Sequence[Finding]:
    """Whether cold files can be read through io_uring."""
    code = io_uring_setup_errno()
    if code == 0:
        return [Finding("io_uring", "ok", "allowed")]
    cost = "cold files are read by more threads with O_DIRECT instead"
    if code == errno.ENOSYS:
        return [Finding("io_uring", "absent", "the kernel has none", cost, "use Linux 5.10 or newer")]
    disabled = read_text(root / "proc/sys/kernel/io_uring_disabled")
    if disabled in ("1", "2"):
        action = "set the sysctl kernel.io_uring_disabled to 0"
        return [Finding("io_uring", "absent", f"kernel.io_uring_disabled is {disabled}", cost, action)]
    name = errno.errorcode.get(code, str(code))
    action = "allow io_uring_setup, io_uring_enter and io_uring_register in the container's seccomp profile"
    return [Finding("io_uring", "absent", f"denied ({name})", cost, action)]


def memlock(root: Path) -> Sequence[Finding]:
    """How much memory this process may lock."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return [Finding("locked memory", "ok", "no limit")]
    if soft >= RING_NBYTES:
        return [Finding("locked memory", "ok", f"limit {_gib(soft)}, {_gib(RING_NBYTES)} are enough")]
    action = "raise it: `ulimit -l unlimited`, LimitMEMLOCK=infinity in a unit, --ulimit memlock=-1 in a container"
    if hard == resource.RLIM_INFINITY or hard >= RING_NBYTES:
        action = f"raise the soft limit, the hard one allows it: `ulimit -l {RING_NBYTES >> 10}`"
    return [
        Finding(
            "locked memory",
            "limited",
            f"limit {soft >> 10} KiB, below the {_gib(RING_NBYTES)} of the ring",
            "io_uring may refuse registered buffers: cold reads cost more CPU time",
            action,
        )
    ]


def rdma(root: Path) -> Sequence[Finding]:
    """RDMA devices that the kernel shows."""
    folder = root / "sys/class/infiniband"
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError:
        names = []
    if not names:
        return [
            Finding(
                "RDMA devices",
                "absent",
                "none",
                "nothing today: xds:// reads local files and needs none",
            )
        ]
    shown = []
    for name in names:
        state = (read_text(folder / name / "ports/1/state") or "unknown").rpartition(": ")[2]
        link = read_text(folder / name / "ports/1/link_layer") or "unknown link"
        shown.append(f"{name} ({link}, port 1 {state})")
    return [Finding("RDMA devices", "ok", ", ".join(shown) + "; not used by xds://")]


def shared_memory(root: Path) -> Sequence[Finding]:
    """Size of ``/dev/shm``: where data loaders and tmpfs checkpoints live."""
    try:
        status = os.statvfs(root / "dev/shm")
    except OSError as error:
        return [
            Finding(
                "/dev/shm",
                "absent",
                f"not there ({error.strerror})",
                "data loaders with worker processes fail",
                "mount a tmpfs at /dev/shm",
            )
        ]
    size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    text = f"{_gib(size)}, {_gib(free)} free"
    if size < 1 << 30:
        return [
            Finding(
                "/dev/shm",
                "limited",
                text,
                "data loaders with worker processes and checkpoints staged there may not fit",
                "give the container more: --shm-size=8g",
            )
        ]
    return [Finding("/dev/shm", "ok", text)]


def pages(root: Path) -> Sequence[Finding]:
    """Page size and huge pages."""
    page_nbytes = os.sysconf("SC_PAGE_SIZE")
    fields = {}
    for line in (read_text(root / "proc/meminfo") or "").splitlines():
        key, _, value = line.partition(":")
        fields[key] = value.split()
    huge_count = int(next(iter(fields.get("HugePages_Total", [])), "0"))
    huge_kib = next(iter(fields.get("Hugepagesize", [])), "?")
    huge = f"{huge_count} huge pages of {huge_kib} KiB" if huge_count else "no huge pages reserved"
    if page_nbytes == 4096:
        return [Finding("pages", "ok", f"4 KiB; {huge}; none are needed")]
    return [
        Finding(
            "pages",
            "limited",
            f"{page_nbytes >> 10} KiB; {huge}",
            "not measured with this page size",
            "compare with `xds load` of your own files",
        )
    ]
