"""From the URL that a person gives to a backend and a path in it. Layer: checkpoint; imports only errors of ours.

Files of this machine are read through ``xds://``, however they are named.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from xds.errors import UrlError

if TYPE_CHECKING:
    from xds.backend import Backend

_LOCAL = ("file://", "local://")


def locate(url: str | os.PathLike[str]) -> tuple[Backend, str]:
    """Return the backend of a URL and the path in it.

    Args:
        url: a URL of a file system of XDS, ``file://``, or a path (relative ones and ``~`` as usual). As in fsspec,
            signs such as ``%`` mean themselves.

    Raises:
        UrlError: another file system.
    """
    import fsspec

    text = os.fspath(url)
    if not isinstance(text, str):
        raise UrlError(f"a URL must be str or a path of str, not {type(text).__name__}")
    path = text if isinstance(url, os.PathLike) or "://" not in text else None
    for prefix in _LOCAL:
        if path is None and text.startswith(prefix):
            path = text.removeprefix(prefix)
            if path.startswith("localhost/"):
                path = path.removeprefix("localhost")
    if path is not None:
        text = f"xds://{os.path.abspath(os.path.expanduser(path))}"  # noqa: PTH100, PTH111 (text, nothing is resolved)
    fs, inside = fsspec.url_to_fs(text)
    backend = getattr(fs, "backend", None)
    if backend is None:
        raise UrlError(
            f"{url}: {type(fs).__name__} cannot read into arrays; "
            "use xds:///path for files of this machine, or copy the checkpoint to it first"
        )
    return backend, inside
