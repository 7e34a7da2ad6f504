"""fsspec#2038: expand_path went round for ever on names that are patterns themselves."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("name", ["*", "**", "?", "a*", "[a]"])
@pytest.mark.parametrize("recursive", [False, True])
def test_names_with_magic_characters_are_expanded_once(fs, tmp_path, name, recursive):
    (tmp_path / name).mkdir()
    (tmp_path / name / name).write_bytes(b"x")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "f").write_bytes(b"x")
    for pattern in (f"{tmp_path}/*", f"{tmp_path}/**", f"{tmp_path}/{name}", f"{tmp_path}/{name}/*"):
        found = fs.expand_path(pattern, recursive=recursive)
        assert found == sorted(set(found))
        assert all(fs.exists(one) for one in found)
    assert set(fs.expand_path(f"{tmp_path}/*")) == {f"{tmp_path}/a", f"{tmp_path}/{name}"}
    assert f"{tmp_path}/{name}/{name}" in fs.expand_path(f"{tmp_path}/*", recursive=True)
