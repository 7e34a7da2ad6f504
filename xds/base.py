"""What every file system of XDS is made of: options, backend, names. Layer: file system.

Backends are found by entry point (group ``xds.backends``, under the protocol's name) and never imported by name.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points
from typing import Any, cast

from fsspec.asyn import AsyncFileSystem

from xds import url
from xds.backend import Backend, Fsync, WritingBackend
from xds.distributions import clash
from xds.errors import ReadOnlyError, XdsError
from xds.options import ALIASES, OPTIONS, Normalised, aliases


def _entry_points(protocol: str) -> list[EntryPoint]:
    """Return the entry points of a backend; our own distribution is asked first: asking all of them takes long."""
    with contextlib.suppress(PackageNotFoundError):
        own = distribution("xpu-direct-storage").entry_points.select(group="xds.backends", name=protocol)
        if own:
            return list(own)
    return list(entry_points(group="xds.backends", name=protocol))


@functools.cache
def backend_class(protocol: str) -> Callable[..., Backend]:
    """Return the class of a protocol's backend.

    Raises:
        XdsError: none is installed, or it cannot be loaded.
    """
    found = _entry_points(protocol)
    reason = "no entry point of the group xds.backends has this name"
    if found:
        try:
            return cast("Callable[..., Backend]", found[0].load())
        except (ImportError, AttributeError) as error:
            reason = f"{found[0].value} cannot be loaded: {error}"
    advice = clash() or "install the package that brings it again"
    raise XdsError(f"there is no backend for {protocol}://: {reason}; {advice}")


class BaseFileSystem(AsyncFileSystem, metaclass=Normalised):  # type: ignore[misc] # fsspec has no types
    """Options, backend and paths; see :class:`xds.filesystem.StorageFileSystem`."""

    protocol = "abstract"
    cachable = True
    #: Whether URLs name a host, which then is the first part of each path.
    authority = False
    # Aliases may hold secrets: they stay in the configuration, out of pickles, JSON and the instance's options.
    _strip_tokenize_options = (ALIASES,)

    def __init__(self, *args: Any, **storage_options: Any) -> None:
        storage_options.pop(ALIASES, None)
        super().__init__(*args, **storage_options)

        def option(name: str) -> Any:
            return OPTIONS[name].value(storage_options.get(name, OPTIONS[name].default))

        self.auto_mkdir: bool = option("auto_mkdir")
        self.block_size: int | None = option("block_size")
        self.cache_type: str = option("cache_type")
        self.fsync: Fsync = option("fsync")
        self.require: Mapping[str, str] = option("require") or {}
        self.timeout_s: float = option("timeout_s")

    @functools.cached_property
    def backend(self) -> Backend:
        """What reads and writes; made at first use."""
        made = backend_class(type(self).protocol)
        return made(endpoint=self.endpoint) if self.authority else made()

    def endpoint(self, name: str) -> dict[str, Any]:
        """Return what belongs to the first part of a path of a protocol whose URLs name a host.

        Args:
            name: a host, or an alias of fsspec's configuration (``{"protocol": {"endpoints": {"alias": {...}}}}``).

        Returns:
            The options of the alias; ``address`` is ``name`` if they say no other.
        """
        return {"address": name, **aliases(type(self).protocol).get(name, {})}

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, (list, tuple)):
            return [cls._strip_protocol(one) for one in path]
        return url.strip(cls.protocol, path, authority=cls.authority)

    def unstrip_protocol(self, name: str) -> str:
        """Return the URL of a path."""
        return url.unstrip(type(self).protocol, name, authority=type(self).authority)

    def transfer_options(
        self, require: Mapping[str, str] | None, timeout_s: float | None
    ) -> tuple[Mapping[str, str] | None, float]:
        """Return what a read or write from arrays was asked for, or else what this file system was."""
        return self.require if require is None else require, self.timeout_s if timeout_s is None else timeout_s

    def _writing(self, what: str, path: Any) -> WritingBackend:
        """Return the backend, if it writes.

        Raises:
            ReadOnlyError: it only reads.
        """
        backend = self.backend
        if not hasattr(backend, "create"):
            name = str(path)
            raise ReadOnlyError(f"{type(self).protocol}:// only reads: cannot {what} {name}", filename=name)
        return cast("WritingBackend", backend)
