"""From the URL that a person gives to a backend and a path in it. Layer: checkpoint; imports errors and protocols.

Files of this machine are read through ``xds://``, however they are named.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from xds import protocols
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
        UrlError: another file system, known before anything of it is imported.
    """
    text = os.fspath(url)
    if not isinstance(text, str):
        raise UrlError(f"a URL must be str or a path of str, not {type(text).__name__}")
    protocol = None if isinstance(url, os.PathLike) else protocols.of(text)
    path = text if protocol is None else None
    for prefix in _LOCAL:
        if path is None and text.startswith(prefix):
            path = text.removeprefix(prefix)
            if path.startswith("localhost/"):
                path = path.removeprefix("localhost")
    if path is not None:
        text = f"xds://{os.path.abspath(os.path.expanduser(path))}"  # noqa: PTH100, PTH111 (text, nothing is resolved)
    elif protocol != "xds" and "::" not in text and protocol not in protocols.ours():
        raise _not_ours(text, f"{protocol}://")
    import fsspec

    fs, inside = fsspec.url_to_fs(text)
    backend = getattr(fs, "backend", None)
    if backend is None:
        raise _not_ours(text, type(fs).__name__)
    return backend, inside


def _not_ours(url: str, what: str) -> UrlError:
    return UrlError(
        f"{url}: {what} cannot read into arrays{protocols.meant(url)}; "
        "use xds:///path for files of this machine, or copy the checkpoint to it first"
    )
