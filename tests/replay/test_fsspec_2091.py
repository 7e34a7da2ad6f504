"""fsspec#2091: merging ranges took quadratic time, and overlapping ones chained past all limits."""

from __future__ import annotations

import random

import numpy as np

from xds.filesystem import XdsFileSystem
from xds.plan import segments


class Counting:
    """Counts what is asked of the storage."""

    def __init__(self, real):
        self._real = real
        self.opened = self.transfers = self.batches = self.rows = self.nbytes = self.largest = 0

    def __getattr__(self, name):
        return getattr(self._real, name)

    def open(self, path):
        self.opened += 1
        return self._real.open(path)

    def transfer(self, *args, **kwargs):
        self.transfers += 1
        transfer, add = self._real.transfer(*args, **kwargs), None

        add = transfer.add

        def counted(batch, **options):
            self.batches += 1
            self.rows += len(batch)
            self.nbytes += int(batch["nbytes"].sum())
            self.largest = max(self.largest, int(batch["nbytes"].max()))
            return add(batch, **options)

        transfer.add = counted
        return transfer


def counted():
    fs = XdsFileSystem(skip_instance_cache=True)
    fs.backend = Counting(XdsFileSystem().backend)
    return fs


def test_work_grows_as_the_ranges_do(data_file, content):
    work = []
    for count in (500, 1000, 2000):
        fs, order = counted(), random.Random(count)
        starts = [order.randrange(len(content) - 3000) for _ in range(count)]
        found = fs.cat_ranges([data_file] * count, starts, [start + 3000 for start in starts])
        assert found == [content[start : start + 3000] for start in starts]
        asked = fs.backend
        assert (asked.opened, asked.transfers, asked.batches) == (1, 1, 1)
        work.append((asked.rows, asked.nbytes))
    # No range is read for another one's sake, none is read twice.
    assert work == [(count, count * 3000) for count in (500, 1000, 2000)]


def test_overlaps_never_chain(data_file, content):
    fs = counted()
    starts = list(range(0, 1_500_000, 100))
    found = fs.cat_ranges([data_file] * len(starts), starts, [start + 150 for start in starts], max_gap=1 << 30)
    assert found == [content[start : start + 150] for start in starts]
    assert fs.backend.largest == 150


def test_max_gap_changes_nothing(fs, data_file, content):
    starts, ends = [5, 0, -10, 5], [9, None, None, 3]
    expected = [content[start:end] for start, end in zip(starts, ends, strict=True)]
    for max_gap in (None, 0, 1, 1 << 40):
        assert fs.cat_ranges([data_file] * 4, starts, ends, max_gap=max_gap) == expected


def test_segments_are_records_and_not_objects():
    assert isinstance(segments(3), np.ndarray)
