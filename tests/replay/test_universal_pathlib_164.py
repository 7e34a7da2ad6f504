"""universal_pathlib#164, kedro#3196, fsspec#418: "#" cut the path, "?" was a query or a pattern."""

from __future__ import annotations

import fsspec
import pytest

NAMES = ["a#b", "#", "a?b=1", "a%20b", "a%2Fb", "a b", "a&b", "a;b", "a:b", "a@b", "~", "ü", "a\nb", "a\\b", "%", "a+b"]


@pytest.mark.parametrize("name", NAMES)
def test_every_character_is_part_of_the_name(fs, tmp_path, name):
    url = f"xds://{tmp_path}/{name}"
    assert fs._strip_protocol(url) == f"{tmp_path}/{name}"
    fs.pipe_file(url, name.encode())
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert fs.cat_file(url) == name.encode()
    assert fs.unstrip_protocol(fs.ls(str(tmp_path), detail=False)[0]) == url
    with fsspec.open(url, expand=False) as file:
        assert file.read() == name.encode()
        assert file.full_name == url
    other, path = fsspec.url_to_fs(url)
    assert other is fs
    assert fs.storage_options == {}
    assert fs.cat_file(path) == name.encode()
    fs.mkdir(url + "d")
    fs.mv(url, f"{url}d/{name}")
    assert fs.find(url + "d") == [f"{tmp_path}/{name}d/{name}"]
