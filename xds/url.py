"""URLs to paths and back. Layer: file system; pure text, imports nothing of ours but errors.

Everything after the scheme is the path, letter by letter: ``%``, ``?``, ``#`` and spaces are ordinary characters, as
in a shell. Two shapes exist:

* ``xds:///path``: no authority (empty or ``localhost``); the path is absolute.
* ``scheme://AUTHORITY/path`` (``authority=True``): the authority stays in the path as its first part, without a
  leading slash, so that tools that only hand paths around never lose it.

``//`` is one slash, ``.`` and ``..`` are resolved as text (a ``..`` behind a symbolic link goes to the parent in the
text), and nothing climbs above the root.
"""

from __future__ import annotations

import os
from typing import Any

from xds.errors import UrlError


def resolve(path: str) -> str:
    """Return ``path`` without empty, ``.`` and ``..`` parts, and without slashes at its ends."""
    parts: list[str] = []
    for part in path.split("/"):
        if part == "..":
            del parts[-1:]
        elif part not in ("", "."):
            parts.append(part)
    return "/".join(parts)


def text(path: Any) -> str:
    """Return ``path`` (str, PathLike, or an object of fsspec with a ``path``) as str."""
    if not isinstance(path, str):
        path = os.fspath(path) if hasattr(path, "__fspath__") else getattr(path, "path", path)
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        if not isinstance(path, str):
            raise TypeError(f"a path must be str or PathLike, not {type(path).__name__}")
    if "\0" in path:
        raise UrlError(f"{path!r} holds a NUL character, which no path can")
    return path


def strip(protocol: str, url: Any, *, authority: bool = False) -> str:
    """Return the path of ``url``; a path without the scheme is normalised in the same way (idempotent).

    Args:
        protocol: the scheme, without ``://``.
        url: str or PathLike.
        authority: whether URLs of this scheme name a host. If so, the result is ``AUTHORITY/path`` without a leading
            slash (``""`` is the root); if not, an absolute path.

    Raises:
        UrlError: the path is not absolute, or names a host where none may stand.
    """
    path = text(url)
    if path.startswith("/") and not authority and "//" not in path and "/." not in path:
        # The common case, many times per read: nothing to resolve.
        return path.rstrip("/") or "/"
    has_scheme = path.startswith(f"{protocol}://")
    if has_scheme:
        path = path[len(protocol) + 3 :]
    elif path.startswith(f"{protocol}::"):
        path = path[len(protocol) + 2 :]
    if authority:
        host, _, rest = path.lstrip("/").partition("/")
        below = resolve(rest)
        return f"{host}/{below}" if below else host
    if path == "localhost" or path.startswith("localhost/"):
        path = path[len("localhost") :] if has_scheme else path
    if path and not path.startswith("/"):
        raise _not_absolute(protocol, text(url), path)
    return "/" + resolve(path)


def unstrip(protocol: str, path: Any, *, authority: bool = False) -> str:
    """Return the URL of ``path``; what :func:`strip` makes of it is ``path`` again."""
    return f"{protocol}://{strip(protocol, path, authority=authority)}"


def _not_absolute(protocol: str, url: str, path: str) -> UrlError:
    suggestions = [f"{protocol}:///{resolve(path)}", f"{protocol}://{os.path.abspath(path)}"]  # noqa: PTH100 (text)
    if "://" in path or path.startswith(f"{protocol}:"):
        rest = path.removeprefix(f"{protocol}:")
        meant = f"did you mean {protocol}:///{resolve(rest)}?" if rest.startswith("/") else ""
        return UrlError(f"{url!r} is no {protocol} URL; {meant or f'write {protocol}:///absolute/path'}")
    return UrlError(
        f"{url!r} has no absolute path: {protocol}:// reads files of this machine and takes no host name, so three "
        f"slashes must follow the colon. Did you mean {suggestions[0]!r} or {suggestions[1]!r}?"
    )
