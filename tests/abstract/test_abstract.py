"""fsspec's own tests of what every file system must do: all of them, called as usual and through the coroutines."""

from __future__ import annotations

import pytest
from fsspec.tests.abstract import (
    AbstractCopyTests,
    AbstractGetTests,
    AbstractOpenTests,
    AbstractPipeTests,
    AbstractPutTests,
    BaseAbstractFixtures,
)


class Fixtures(BaseAbstractFixtures):
    """What fsspec gives each test, without the fixtures of ``AbstractFixtures``, which are in conftest.py."""

    local_join = pytest.fixture(lambda self: lambda *parts: "/".join(parts))
    supports_empty_directories = pytest.fixture(lambda self: True)
    fs_sanitize_path = pytest.fixture(lambda self: lambda path: path)


class TestCopy(Fixtures, AbstractCopyTests):
    """``copy``."""


class TestGet(Fixtures, AbstractGetTests):
    """``get``."""


class TestPut(Fixtures, AbstractPutTests):
    """``put``."""


class TestOpen(Fixtures, AbstractOpenTests):
    """``open``."""


class TestPipe(Fixtures, AbstractPipeTests):
    """``pipe_file``."""
