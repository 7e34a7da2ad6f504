"""ray#61850 and #47765: the scheme of a URL and the protocol of its file system must be the same one word."""

from __future__ import annotations

from urllib.parse import urlsplit

import fsspec
import pytest
from fsspec.registry import get_filesystem_class


def test_scheme_and_protocol_agree(fs, tmp_path):
    (tmp_path / "f").write_bytes(b"x")
    url = f"xds://{tmp_path}/f"
    parts = urlsplit(url)
    assert parts.scheme == fs.protocol == type(fs).protocol == "xds"
    assert (parts.netloc, parts.path) == ("", f"{tmp_path}/f")
    assert get_filesystem_class("xds") is type(fs)
    assert fsspec.core.split_protocol(url) == ("xds", f"{tmp_path}/f")
    # A tool that strips the scheme by itself must reach the same file.
    for path in (url, url.removeprefix("xds://"), parts.path):
        assert fs.cat_file(path) == b"x"
    assert fs.unstrip_protocol(f"{tmp_path}/f") == url
    assert all(fs.unstrip_protocol(one).startswith("xds:///") for one in fs.find(str(tmp_path)))


@pytest.mark.parametrize("name", ["xds"])
def test_protocols_are_plain_words(name):
    protocol = get_filesystem_class(name).protocol
    assert isinstance(protocol, str)
    assert protocol.isalnum()
    assert protocol.islower()
