"""What the tests of other tools share: proof that ours moved the bytes."""

from __future__ import annotations

import contextlib

import pytest

import xds


@pytest.fixture
def moves():
    """A block within which this process must read (or write) at least so many bytes through XDS."""

    @contextlib.contextmanager
    def block(nbytes=1, operation="read"):
        key = {"read": "nbytes", "write": "written_nbytes"}[operation]
        before = xds.stats()[key]
        with xds.collect() as reports:
            yield
        assert xds.stats()[key] - before >= nbytes
        assert sum(report.nbytes for report in reports if report.operation == operation) >= nbytes
        assert reports.errors == 0

    return block
