"""tensorizer#55 (also safetensors#528, #195): where mmap of the file is refused, it is read all the same."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from checkpoint_files import noise, write

#: Refuses to map files as data, as some network file systems do; libraries (executable pages) still map.
SHIM = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
void *mmap(void *address, size_t length, int prot, int flags, int fd, off_t offset) {
    if (fd >= 0 && !(flags & MAP_ANONYMOUS) && !(prot & PROT_EXEC)) {
        errno = ENODEV;
        return MAP_FAILED;
    }
    return (void *)syscall(SYS_mmap, address, length, prot, flags, fd, offset);
}
void *mmap64(void *address, size_t length, int prot, int flags, int fd, off_t offset) {
    return mmap(address, length, prot, flags, fd, offset);
}
"""

CODE = """
import hashlib, mmap, sys, xds
with open(sys.argv[1], "rb") as file:
    try:
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    except OSError:
        print("refused")
print(hashlib.sha256(xds.load(sys.argv[1], device="cpu")["t"].tobytes()).hexdigest())
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build the shim that refuses mmap")
@pytest.mark.parametrize("where", ["disk", "memory"])
def test_a_file_that_cannot_be_mapped(tmp_path, where):
    import hashlib

    (tmp_path / "shim.c").write_text(SHIM)
    shim = tmp_path / "shim.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", shim, tmp_path / "shim.c"], check=True)
    data = noise((12 << 20) + 5)
    with tempfile.TemporaryDirectory(dir=tmp_path if where == "disk" else "/dev/shm") as folder:
        path = write(Path(folder) / "m.safetensors", {"t": ("U8", (len(data),), data)})
        ended = subprocess.run(
            [sys.executable, "-c", CODE, path],
            env={**os.environ, "LD_PRELOAD": str(shim)},
            capture_output=True,
            text=True,
            check=False,
        )
    assert ended.stdout.split() == ["refused", hashlib.sha256(data).hexdigest()], ended.stderr
