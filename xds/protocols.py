"""Which protocol a URL names, and which are ours. Layer: file system; imports nothing of ours but errors.

Protocols are known by entry point (group ``xds.backends``); no backend and no file system is imported here.
"""

from __future__ import annotations

import difflib
import functools
import importlib.metadata

from xds.errors import UrlError


@functools.cache
def ours() -> tuple[str, ...]:
    """Return the protocols of XDS that are installed, sorted."""
    return tuple(sorted({entry.name for entry in importlib.metadata.entry_points(group="xds.backends")}))


def of(target: str) -> str | None:
    """Return the protocol of a URL, of a chain the last words before ``://``; ``None`` for a plain path.

    Raises:
        UrlError: one of our protocols without ``//``, as in ``xds:/data``; a file of such a name is ``./xds:/data``.
    """
    protocol, colon, rest = target.partition("://")
    if colon:
        return protocol
    protocol, colon, rest = target.partition(":")
    if colon and protocol == "xds":
        raise UrlError(f"{target!r} is no URL; did you mean xds:///{rest.lstrip('/')}?")
    return None


def meant(url: str) -> str:
    """Return ``; did you mean ...?`` where the protocol of ``url`` looks like one of ours, else nothing."""
    protocol, _, rest = url.partition("://")
    close = difflib.get_close_matches(protocol.lower(), ours(), 1)
    return f"; did you mean {close[0]}://{rest}?" if close else ""


def check(url: str) -> None:
    """Raise UrlError for a protocol that neither fsspec nor XDS knows; what fsspec knows need not be installed."""
    from fsspec.registry import known_implementations, registry

    protocol = (of(url) or "").split("::")[0]
    if protocol and protocol not in registry and protocol not in known_implementations and protocol not in ours():
        raise UrlError(
            f"{url}: unknown protocol {protocol!r}{meant(url)}; XDS has {', '.join(ours())}, and those of fsspec's "
            "other packages can be listed and read, not loaded"
        )
