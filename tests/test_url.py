from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xds import url
from xds.errors import UrlError


@pytest.mark.parametrize(
    ("given_url", "path"),
    [
        ("xds:///a/b", "/a/b"),
        ("xds://localhost/a/b", "/a/b"),
        ("xds://localhost", "/"),
        ("xds://", "/"),
        ("xds:///", "/"),
        ("", "/"),
        ("/", "/"),
        ("//", "/"),
        ("/a/b/", "/a/b"),
        ("/a//b///c", "/a/b/c"),
        ("xds:////a", "/a"),
        ("/a/./b/.", "/a/b"),
        ("/a/../b", "/b"),
        ("/../../etc", "/etc"),
        ("xds:///../..", "/"),
        ("/a/.hidden/..b/c..", "/a/.hidden/..b/c.."),
        ("xds:///a%20b", "/a%20b"),
        ("xds:///a b?c=d#e&f", "/a b?c=d#e&f"),
        ("xds:///a[0]*{x}\n\u2028é", "/a[0]*{x}\n\u2028é"),
        ("/localhost/a", "/localhost/a"),
        ("/a/xds://b", "/a/xds:/b"),
        ("xds::/a", "/a"),
        (Path("/a/b"), "/a/b"),
        (PurePosixPath("/a/b/../c"), "/a/c"),
        ("/a\udcff", "/a\udcff"),
    ],
)
def test_strip(given_url, path):
    assert url.strip("xds", given_url) == path
    assert url.strip("xds", path) == path


@pytest.mark.parametrize(
    ("given_url", "suggestion"),
    [
        ("xds://models/a.safetensors", "xds:///models/a.safetensors"),
        ("a/b", "xds:///a/b"),
        ("localhost/a", "xds:///localhost/a"),
        ("xds:/a", "did you mean xds:///a?"),
        ("file:///a", "xds:///"),
        ("xds://localhost:80/a", "xds:///"),
    ],
)
def test_a_path_that_is_not_absolute_is_refused_with_a_suggestion(given_url, suggestion):
    with pytest.raises(UrlError, match="xds") as caught:
        url.strip("xds", given_url)
    assert suggestion in str(caught.value)
    assert given_url in str(caught.value)


def test_the_suggestion_knows_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UrlError) as caught:
        url.strip("xds", "xds://a.bin")
    assert f"xds://{tmp_path}/a.bin" in str(caught.value)


def test_nul_and_what_is_no_path_are_refused():
    with pytest.raises(UrlError, match="NUL"):
        url.strip("xds", "/a\0b")
    for wrong in (None, 1, object()):
        with pytest.raises(TypeError):
            url.strip("xds", wrong)


@pytest.mark.parametrize(
    ("given_url", "path"),
    [
        ("nvmeof://host/n1/a", "host/n1/a"),
        ("nvmeof://host", "host"),
        ("nvmeof://host/", "host"),
        ("nvmeof://host//a/../b", "host/b"),
        ("nvmeof://host/../../x", "host/x"),
        ("/host/a", "host/a"),
        ("host/a", "host/a"),
        ("", ""),
    ],
)
def test_the_authority_stays_in_the_path(given_url, path):
    assert url.strip("nvmeof", given_url, authority=True) == path
    assert url.strip("nvmeof", path, authority=True) == path
    assert url.strip("nvmeof", url.unstrip("nvmeof", path, authority=True), authority=True) == path


@given(st.text(st.characters(blacklist_characters="\0"), max_size=40))
def test_strip_is_idempotent_and_round_trips(tail):
    path = url.strip("xds", "/" + tail)
    assert path.startswith("/")
    assert not {"", ".", ".."} & set(path.split("/")[1:]) or path == "/"
    assert url.strip("xds", path) == path
    assert url.strip("xds", url.unstrip("xds", path)) == path
    assert url.strip("xds", "xds:///" + tail) == path


@given(st.lists(st.sampled_from(["a", "b", ".", "..", ""]), max_size=12))
def test_resolve_is_what_posix_does(parts):
    text = "/".join(parts)
    expected: list[str] = []
    for part in parts:
        if part == "..":
            expected = expected[:-1]
        elif part not in ("", "."):
            expected.append(part)
    assert url.resolve(text).split("/") == (expected or [""])
