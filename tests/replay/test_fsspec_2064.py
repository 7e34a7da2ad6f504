"""fsspec#2064: two threads that made the same file system at once got two."""

from __future__ import annotations

import threading

import pytest

from xds.filesystem import XdsFileSystem


@pytest.mark.parametrize("attempt", range(5))
def test_all_threads_get_one_instance(attempt):
    options = {"batch_size": 1000 + attempt, "timeout_s": "17"}
    barrier, found = threading.Barrier(16), []

    def make():
        barrier.wait(30)
        fs = XdsFileSystem(**options)
        found.append((fs, fs.backend))

    threads = [threading.Thread(target=make) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(fs) for fs, _ in found}) == 1
    assert XdsFileSystem(**{**options, "timeout_s": 17}) is found[0][0]
