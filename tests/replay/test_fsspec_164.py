"""fsspec#164: after two slashes a part of the path was taken for a host."""

from __future__ import annotations

import fsspec
import pytest

from xds.errors import UrlError


@pytest.mark.parametrize("url", ["xds:///{}", "xds:////{}", "xds://localhost/{}", "//{}", "/{}", "xds::/{}", "///./{}"])
def test_slashes_at_the_start(fs, tmp_path, url):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "f").write_bytes(b"x")
    for rest in ("a/f", "a//f", "a/./f", "/a/f", "a///f", "a/b/../f"):
        given = url.format(str(tmp_path)[1:] + "/" + rest)
        assert fs._strip_protocol(given) == f"{tmp_path}/a/f"
        assert fs.cat_file(given) == b"x"


@pytest.mark.parametrize("url", ["xds://host/a", "xds://a", "xds://a/b/c", "relative/path", "a"])
def test_what_names_a_host_is_refused(fs, url):
    with pytest.raises(UrlError):
        fs.cat_file(url)
    with pytest.raises(UrlError):
        fs.pipe_file(url, b"")


def test_all_names_round_trip(tmp_path):
    (tmp_path / "f").write_bytes(b"x")
    fs, path = fsspec.url_to_fs(f"xds://{tmp_path}//f")
    assert path == f"{tmp_path}/f"
    assert fsspec.url_to_fs(fs.unstrip_protocol(path)) == (fs, path)
