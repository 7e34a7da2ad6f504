"""Whether enough host memory is left: of the machine, and below the limits of cgroups v2 and v1."""

from __future__ import annotations

import pytest

from xds.interop import host

MEMINFO = "MemTotal: 9000 kB\nMemAvailable: 8000 kB\nSwapFree: 0 kB\nHugePages_Total: 0\n"
MACHINE = 8000 << 10
GIB = 1 << 30


def machine(root, files):
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v2(folder, limit, used, stat="", swap=None):
    base = "/".join(("sys/fs/cgroup", *folder))
    files = {f"{base}/memory.max": f"{limit}\n", f"{base}/memory.current": f"{used}\n", f"{base}/memory.stat": stat}
    if swap is not None:
        files |= {f"{base}/memory.swap.max": f"{swap[0]}\n", f"{base}/memory.swap.current": f"{swap[1]}\n"}
    return files


def v1(folder, limit, used, stat="", memsw=None):
    base = "/".join(("sys/fs/cgroup/memory", *folder))
    files = {
        f"{base}/memory.limit_in_bytes": f"{limit}\n",
        f"{base}/memory.usage_in_bytes": f"{used}\n",
        f"{base}/memory.stat": stat,
    }
    if memsw is not None:
        files |= {
            f"{base}/memory.memsw.limit_in_bytes": f"{memsw[0]}\n",
            f"{base}/memory.memsw.usage_in_bytes": f"{memsw[1]}\n",
        }
    return files


OWN = {"proc/self/cgroup": "0::/pod/container\n"}
OLD = {"proc/self/cgroup": "5:cpu,cpuacct:/other\n4:memory:/docker/0123\n1:name=systemd:/x:y\n0::/\n"}
SWAP = {"proc/meminfo": MEMINFO.replace("SwapFree: 0", "SwapFree: 1000")}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, MACHINE),
        (OWN, MACHINE),
        (OWN | v2(("pod", "container"), "max", 10_000), MACHINE),
        (OWN | v2(("pod", "container"), 1 << 20, 1000), (1 << 20) - 1000),
        # The machine may have less than the cgroup allows.
        (OWN | v2(("pod", "container"), GIB, 0), MACHINE),
        # The tightest of one's own and those above; not the neighbours'.
        (
            OWN
            | v2(("pod", "container"), 3 << 20, 0)
            | v2(("pod",), 2 << 20, 5)
            | v2((), 4 << 20, 0)
            | v2(("other",), 1000, 0),
            (2 << 20) - 5,
        ),
        # A container without a namespace of its own, and a process outside of the namespace's root.
        (OWN | v2((), 1 << 20, 0), 1 << 20),
        ({"proc/self/cgroup": "0::/../../a\n"} | v2((), 1 << 20, 0), 1 << 20),
        # The page cache counts as used, and is given back.
        (
            OWN | v2(("pod", "container"), 1 << 20, 1 << 20, "anon 500\nactive_file 300\ninactive_file 20\nshmem 9\n"),
            320,
        ),
        (OWN | v2(("pod", "container"), 1 << 20, 1000, "inactive_file 5000\n"), 1 << 20),
        # Over the limit already.
        (OWN | v2(("pod", "container"), 1000, 5000), 0),
        # Swap: of the machine, and as far as the cgroup has some.
        (SWAP, MACHINE + (1000 << 10)),
        (OWN | SWAP | v2(("pod", "container"), 5000, 1000), 4000 + (1000 << 10)),
        (OWN | SWAP | v2(("pod", "container"), 5000, 1000, swap=("max", 7)), 4000 + (1000 << 10)),
        (OWN | SWAP | v2(("pod", "container"), 5000, 1000, swap=(300, 100)), 4200),
        (OWN | SWAP | v2(("pod", "container"), 5000, 1000, swap=(0, 0)), 4000),
        # v1; a number near 2^63 is no limit.
        (OLD | v1(("docker", "0123"), 9223372036854771712, 10), MACHINE),
        (OLD | v1(("docker", "0123"), 5000, 1000), 4000),
        (OLD | v1(("docker", "0123"), 5000, 1000) | v1(("docker",), 2000, 1500), 500),
        (OLD | v1((), 5000, 1000), 4000),
        (
            OLD | v1(("docker", "0123"), 5000, 5000, "inactive_file 1\ntotal_inactive_file 70\ntotal_active_file 7\n"),
            77,
        ),
        (OLD | SWAP | v1(("docker", "0123"), 5000, 1000), 4000 + (1000 << 10)),
        (OLD | SWAP | v1(("docker", "0123"), 5000, 1000, memsw=(6000, 1500)), 4500),
        (OLD | SWAP | v1(("docker", "0123"), 5000, 1000, memsw=(5000, 1000)), 4000),
        # A hybrid: v1 has the memory, v2 is mounted beside it.
        (OLD | {"sys/fs/cgroup/unified/cgroup.procs": ""} | v1(("docker", "0123"), 5000, 1000), 4000),
        # Nothing that can be read.
        (OWN | v2(("pod", "container"), "\0\ud7ff", "x"), MACHINE),
        ({"proc/self/cgroup": "\0\ud7ff: 1 : 2\n::\n0::\0\n\n:"}, MACHINE),
    ],
)
def test_available(tmp_path, files, expected):
    root = machine(tmp_path, files)
    assert host.available_nbytes(root) == expected
    host.require_available(expected, "a load", root)
    with pytest.raises(MemoryError, match=rf"needs {expected + 1} bytes of host memory, {expected} are available"):
        host.require_available(expected + 1, "a load", root)


def test_the_limit_is_named(tmp_path):
    root = machine(tmp_path, OWN | v2(("pod",), 5000, 1000))
    with pytest.raises(MemoryError, match=r"4000 are available below the limit in .*/cgroup/pod/memory\.max"):
        host.require_available(4001, "a load", root)


def test_nothing_is_known(tmp_path):
    assert host.available_nbytes(tmp_path) is None
    host.require_available(1 << 60, "a load", tmp_path)


def test_this_machine():
    assert host.available_nbytes() > 1 << 20
