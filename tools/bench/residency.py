"""Is a file in the page cache? Dropped, filled, and proven by reads that may not wait. Layer: tools; stdlib alone."""

from __future__ import annotations

import mmap
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PAGE = mmap.PAGESIZE


def resident_share(path: Path, samples: int = 64, seed: int | None = None) -> float:
    """Return the share of sampled pages that ``preadv2(RWF_NOWAIT)`` delivers at once, 0 to 1.

    A sample of a cold page brings that page in, so the places are drawn anew on each call.
    """
    size = path.stat().st_size
    pages = max(1, -(-size // PAGE))
    places = random.Random(seed).sample(range(pages), min(samples, pages))
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        found = 0
        buffer = bytearray(PAGE)
        for page in places:
            try:
                found += os.preadv(fd, [buffer], page * PAGE, os.RWF_NOWAIT) > 0
            except BlockingIOError:
                continue
        return found / len(places)
    finally:
        os.close(fd)


def drop(paths: list[Path]) -> None:
    """Put files out of the page cache; they must have been synced."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def fill(paths: list[Path], threads: int | None = None) -> None:
    """Read files into the page cache, each 64 MiB by one of ``threads``."""
    step = 64 << 20

    def read(job: tuple[Path, int]) -> None:
        path, start = job
        buffer = bytearray(4 << 20)
        fd = os.open(path, os.O_RDONLY)
        try:
            offset = start
            while offset < start + step and (got := os.preadv(fd, [buffer], offset)):
                offset += got
        finally:
            os.close(fd)

    jobs = [(path, start) for path in paths for start in range(0, path.stat().st_size, step)]
    with ThreadPoolExecutor(threads or len(os.sched_getaffinity(0))) as pool:
        list(pool.map(read, jobs))


def make_cold(paths: list[Path]) -> float:
    """Drop files and return the largest resident share found afterwards (0.0 proves them cold)."""
    drop(paths)
    share = max(resident_share(path) for path in paths)
    drop(paths)  # the sampled pages
    return share


def make_warm(paths: list[Path]) -> float:
    """Fill the page cache with files and return the smallest resident share found (1.0 proves them warm)."""
    share = min(resident_share(path) for path in paths)
    if share < 1.0:
        fill(paths)
        share = min(resident_share(path) for path in paths)
    return share
