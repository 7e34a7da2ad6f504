"""Storage options: their types, defaults and one spelling for each. Layer: file system; knows no backend.

fsspec keeps one instance for each *spelling* of the options: order, explicit defaults and ``"64"`` for ``64`` all
make a new one. Here the options take one form before fsspec sees them. They come from the caller, from fsspec's
configuration files (where INI values are text) and from ``FSSPEC_XDS``, ``FSSPEC_XDS_*`` in the environment.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fsspec.config import apply_config, conf
from fsspec.core import caches
from fsspec.spec import AbstractFileSystem

_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
#: Where configuration holds the aliases of endpoints.
ALIASES = "endpoints"


def _flag(value: Any) -> bool:
    if isinstance(value, str):
        if value.strip().lower() not in _WORDS:
            raise ValueError("must be true or false")
        return _WORDS[value.strip().lower()]
    if not isinstance(value, (bool, int)):
        raise TypeError("must be true or false")
    return bool(value)


def _integer(value: Any) -> int:
    number = int(value) if isinstance(value, (str, int)) else float(value)
    if number != int(number):
        raise ValueError("must be a whole number")
    return int(number)


def _positive(value: Any) -> int:
    number = _integer(value)
    if number <= 0:
        raise ValueError("must be positive")
    return number


def _seconds(value: Any) -> float:
    seconds = float(value)
    if not seconds > 0:
        raise ValueError("must be a positive number of seconds")
    return seconds


def _mapping(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        value = json.loads(value)
    if not isinstance(value, Mapping):
        raise TypeError("must be a mapping (JSON, where it is text)")
    return {str(key): value[key] for key in sorted(value)}


def _one_of(*names: str) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        if value not in names:
            raise ValueError(f"must be one of {', '.join(names)}")
        return str(value)

    return check


def _cache_type(value: Any) -> str:
    return _one_of(*sorted(str(name) for name in caches))(value)


@dataclass(frozen=True, slots=True)
class Option:
    """One option: what it is if nobody says, how it is read, whether ``None`` (also as text) is a value."""

    default: Any
    read: Callable[[Any], Any]
    nullable: bool = False

    def value(self, given: Any) -> Any:
        """Return ``given`` in its one form."""
        if self.nullable and (given is None or (isinstance(given, str) and given.strip().lower() in ("", "none"))):
            return None
        return self.read(given)


#: fsspec's own, and those of all protocols of XDS.
OPTIONS = {
    "asynchronous": Option(False, _flag),
    "batch_size": Option(None, _integer, nullable=True),
    "skip_instance_cache": Option(False, _flag),
    "use_listings_cache": Option(True, _flag),
    "listings_expiry_time": Option(None, _seconds, nullable=True),
    "max_paths": Option(None, _positive, nullable=True),
    "auto_mkdir": Option(False, _flag),
    "block_size": Option(None, _positive, nullable=True),
    "cache_type": Option("none", _cache_type),
    "fsync": Option("none", _one_of("none", "data", "full")),
    "require": Option({}, _mapping, nullable=True),
    "timeout_s": Option(60.0, _seconds),
}


def normalised(protocol: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options in the order of their names, known ones with their types, without those at their default.

    Raises:
        ValueError: a known option with a value that it cannot have.
    """
    configured = conf.get(protocol, {})
    out = {}
    for name in sorted(given):
        value = given[name]
        if name in OPTIONS:
            option = OPTIONS[name]
            try:
                value = option.value(value)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{protocol}:// option {name}={value!r}: {error}") from None
            # What the configuration says otherwise has to be said again.
            if name not in configured and (value == option.default or (value is None and not option.default)):
                continue
        elif name == "loop" and value is None:
            continue
        out[name] = value
    return out


def aliases(protocol: str) -> dict[str, dict[str, Any]]:
    """Return the aliases of endpoints of a protocol: name to options, from fsspec's configuration.

    Raises:
        ValueError: they are not a mapping of names to mappings, or a name holds a slash.
    """
    try:
        found = {name: _mapping(value) for name, value in _mapping(conf.get(protocol, {}).get(ALIASES, {})).items()}
    except (TypeError, ValueError) as error:
        raise ValueError(f"fsspec's configuration of {protocol}, {ALIASES}: {error}") from None
    for name in found:
        if not name or "/" in name:
            raise ValueError(f"fsspec's configuration of {protocol}, {ALIASES}: {name!r} cannot be a name in a URL")
    return found


class Normalised(type(AbstractFileSystem)):  # type: ignore[misc] # fsspec has no types
    """fsspec's metaclass, which finds instances again by their options, in front of it one spelling for them."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        """Return the instance for these options."""
        if ALIASES in options:
            raise ValueError(
                f"{ALIASES}= is no argument: names of endpoints and what belongs to them stay in fsspec's "
                f"configuration ({cls.protocol} in a file of its folder, or FSSPEC_{str(cls.protocol).upper()})"
            )
        return super().__call__(*args, **normalised(cls.protocol, apply_config(cls, options)))
