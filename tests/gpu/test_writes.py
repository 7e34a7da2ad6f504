"""Writes from GPU arrays through open files: bytes, positions, streams, futures, what fails."""

from __future__ import annotations

import os

import pytest
from fake_gpu import Interface

from xds.errors import XdsError

pytestmark = pytest.mark.gpu

MIB = 1 << 20


@pytest.fixture
def filled(gpu, fs, tmp_path_factory):
    """Make a GPU array of some bytes."""
    path = tmp_path_factory.mktemp("source") / "bytes"

    def make(data):
        path.write_bytes(data)
        array = gpu.empty(len(data))
        fs.readinto_ranges([str(path)], [0], [None], [array])
        return array

    return make


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 65537, 3 * MIB + 5])
@pytest.mark.parametrize("mode", ["wb", "xb", "ab", "r+b"])
def test_writefrom_at_the_position(gpu, filled, fs, tmp_path, content, nbytes, mode):
    path = tmp_path / "out"
    before = b"" if mode in ("wb", "xb") else b"0123456789"
    if mode != "xb":
        path.write_bytes(b"0123456789")
    array = filled(content[: nbytes + 20])
    inner = Interface(gpu.address(array) + 7, nbytes, keepalive=array)
    with fs.open(str(path), mode) as file:
        file.write(b"head")
        assert file.writefrom(inner) == nbytes
        assert file.tell() == (len(before) if mode == "ab" else 0) + 4 + nbytes
        file.write(b"tail")
        report = file.report
    expected = b"head" + content[7 : 7 + nbytes] + b"tail"
    if mode == "ab":
        expected = before + expected
    elif mode == "r+b":
        expected += before[len(expected) :]
    assert path.read_bytes() == expected
    assert os.listdir(tmp_path) == ["out"]
    assert report.operation == "write"


def test_the_report_says_where_from(filled, fs, tmp_path, content):
    with fs.open(str(tmp_path / "out"), "wb") as file:
        file.writefrom(filled(content))
        assert (file.report.nbytes, file.report.device, file.report.operation) == (len(content), 0, "write")
        assert dict(file.report.placement) == {"copy": len(content)}
    assert (tmp_path / "out").read_bytes() == content


def test_pwrite_in_any_order(filled, fs, tmp_path, content):
    step = 700_001
    offsets = list(range(0, len(content), step))
    with fs.open(str(tmp_path / "out"), "wb") as file:
        arrays = [filled(content[offset : offset + step]) for offset in offsets]
        pairs = reversed(list(zip(arrays, offsets, strict=True)))
        futures = [file.pwrite(array, offset=offset) for array, offset in pairs]
        assert sum(future.get() for future in futures[:2]) > 0
        # The close waits for the rest.
    assert (tmp_path / "out").read_bytes() == content
    assert all(future.done() for future in futures)


def test_a_transaction_of_gpu_arrays(filled, fs, tmp_path, content):
    (tmp_path / "log").write_bytes(b"old")
    with fs.transaction:
        for name, mode in (("new", "wb"), ("log", "ab")):
            with fs.open(str(tmp_path / name), mode) as file:
                file.writefrom(filled(content[:100_000]))
        assert not (tmp_path / "new").exists()
        assert (tmp_path / "log").read_bytes() == b"old"
    assert (tmp_path / "new").read_bytes() == content[:100_000]
    assert (tmp_path / "log").read_bytes() == b"old" + content[:100_000]


def test_a_write_that_fails_leaves_the_old_file(fake, filled, fs, tmp_path, content):
    (tmp_path / "out").write_bytes(b"old")
    array = filled(content)
    with fs.open(str(tmp_path / "out"), "wb") as file:
        fake.set("code_copy", 700)
        fake.set("fail_copy", 1)
        with pytest.raises(XdsError):
            file.writefrom(array)
        with pytest.raises(OSError, match="discarded"):
            file.close()
    assert (tmp_path / "out").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["out"]
