"""ServerlessLLM#60: a read that returned fewer bytes than asked for was fatal. It is continued."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from checkpoint_files import noise, write

#: Every third positioned read brings at most 1000 bytes, every seventh is interrupted.
SHIM = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>
static atomic_long calls;
__attribute__((destructor)) static void report(void) { dprintf(1, "%ld calls\n", atomic_load(&calls)); }
static ssize_t shorter(int fd, const struct iovec *vectors, int count, off_t offset, int flags) {
    struct iovec first = vectors[0];
    long call = atomic_fetch_add(&calls, 1);
    if (call % 7 == 5) {
        errno = EINTR;
        return -1;
    }
    if (call % 3 == 1) {
        if (first.iov_len > 1000) first.iov_len = 1000;
        return syscall(SYS_preadv2, fd, &first, 1, offset, 0, flags);
    }
    return syscall(SYS_preadv2, fd, vectors, count, offset, 0, flags);
}
ssize_t pread(int fd, void *buffer, size_t nbytes, off_t offset) {
    struct iovec one = {buffer, nbytes};
    return shorter(fd, &one, 1, offset, 0);
}
ssize_t pread64(int fd, void *buffer, size_t nbytes, off_t offset) { return pread(fd, buffer, nbytes, offset); }
ssize_t preadv(int fd, const struct iovec *vectors, int count, off_t offset) {
    return shorter(fd, vectors, count, offset, 0);
}
ssize_t preadv64(int fd, const struct iovec *vectors, int count, off_t offset) {
    return shorter(fd, vectors, count, offset, 0);
}
ssize_t preadv2(int fd, const struct iovec *vectors, int count, off_t offset, int flags) {
    return shorter(fd, vectors, count, offset, flags);
}
ssize_t preadv64v2(int fd, const struct iovec *vectors, int count, off_t offset, int flags) {
    return shorter(fd, vectors, count, offset, flags);
}
"""

CODE = """
import hashlib, sys, xds
print(hashlib.sha256(xds.load(sys.argv[1], device="cpu")["t"].tobytes()).hexdigest())
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build the shim that shortens reads")
def test_short_and_interrupted_reads(tmp_path):
    import hashlib

    (tmp_path / "shim.c").write_text(SHIM)
    shim = tmp_path / "shim.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", shim, tmp_path / "shim.c"], check=True)
    data = noise((3 << 20) + 5)
    path = write(tmp_path / "m.safetensors", {"t": ("U8", (len(data),), data)})
    ended = subprocess.run(
        [sys.executable, "-c", CODE, path],
        env={**os.environ, "LD_PRELOAD": str(shim)},
        capture_output=True,
        text=True,
        check=False,
    )
    words = ended.stdout.split()
    assert words[:1] == [hashlib.sha256(data).hexdigest()], ended.stderr
    # Enough calls that some of those that brought the tensor were short: the shim was in the way.
    assert int(words[1]) > 7
