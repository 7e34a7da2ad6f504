"""fsspec#1682 and OCA/storage#319: a cached instance kept a connection that was dead."""

from __future__ import annotations

import fsspec
import pytest

import xds
from xds.filesystem import XdsFileSystem


@pytest.mark.parametrize("nbytes", [10, None])
def test_an_instance_lives_on_after_what_it_used_was_closed(fs, data_file, content, nbytes):
    with fs.open(data_file) as file:
        for _ in range(3):
            assert fs.cat_file(data_file, 0, nbytes) == content[:nbytes]
            xds.close()
            assert fs.cat_file(data_file, 0, nbytes) == content[:nbytes]
            file.seek(0)
            assert file.read(nbytes) == content[:nbytes]
            assert fsspec.filesystem("xds") is fs


def test_a_failed_backend_is_tried_again(monkeypatch, data_file, content):
    fs = XdsFileSystem(skip_instance_cache=True)
    real = fs.backend.open
    monkeypatch.setattr(fs.backend, "open", lambda path: (_ for _ in ()).throw(OSError("gone")), raising=False)
    with pytest.raises(OSError, match="gone"):
        fs.cat_file(data_file)
    monkeypatch.setattr(fs.backend, "open", real, raising=False)
    assert fs.cat_file(data_file) == content


def test_an_instance_lives_on_in_a_forked_child(fs, data_file, content, in_child):
    assert fs.cat_file(data_file) == content

    def check():
        assert fs.cat_file(data_file) == content
        fs.pipe_file(data_file + "2", content)
        assert fs.cat_file(data_file + "2") == content

    assert in_child(check) == 0
