"""fsspec's own tests of reading file systems; local files are the seed, as nothing can be written through ``xds://``."""

from __future__ import annotations

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem, make_path_posix
from fsspec.tests.abstract import AbstractFixtures, AbstractGetTests


class XdsFixtures(AbstractFixtures):
    @pytest.fixture
    def fs(self):
        return fsspec.filesystem("xds")

    @pytest.fixture
    def fs_path(self, tmp_path):
        return str(tmp_path / "remote")

    @pytest.fixture
    def fs_join(self):
        return lambda *parts: "/".join(parts)

    @pytest.fixture
    def local_fs(self):
        return LocalFileSystem(auto_mkdir=True)

    @pytest.fixture
    def local_path(self, tmp_path):
        return make_path_posix(str(tmp_path / "local"))

    @pytest.fixture
    def fs_bulk_operations_scenario_0(self, local_fs, fs_join, fs_path):
        return self._bulk_operations_scenario_0(local_fs, fs_join, fs_path)

    @pytest.fixture
    def fs_glob_edge_cases_files(self, local_fs, fs_join, fs_path):
        return self._glob_edge_cases_files(local_fs, fs_join, fs_path)

    @pytest.fixture
    def fs_dir_and_file_with_same_name_prefix(self, local_fs, fs_join, fs_path):
        return self._dir_and_file_with_same_name_prefix(local_fs, fs_join, fs_path)

    @pytest.fixture
    def fs_10_files_with_hashed_names(self, local_fs, fs_join, fs_path):
        return self._10_files_with_hashed_names(local_fs, fs_join, fs_path)


class TestGet(XdsFixtures, AbstractGetTests):
    """``get`` in all its forms."""

    @pytest.mark.parametrize("slash", ["", "/"])
    def test_get_directory_recursive(self, fs, fs_path, local_fs, local_path, slash):
        # fsspec's own makes its folder through the file system under test.
        source, target = fs_path + "/src", local_path + "/target"
        local_fs.touch(source + "/file")
        # Into a folder that is not there yet, the contents go; into one that is, the folder itself, unless the source
        # ends with a slash.
        fs.get(source + slash, target, recursive=True)
        assert local_fs.find(target) == [target + "/file"]
        fs.get(source + slash, target, recursive=True)
        assert local_fs.find(target) == [target + "/file"] + ([] if slash else [target + "/src/file"])
