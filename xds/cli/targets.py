"""What the commands share: targets, sizes, progress, JSON. Layer: top."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from xds import protocols
from xds.cli.errors import echo


def to_url(target: str) -> str:
    """Return ``target`` as a URL; a plain path becomes ``xds://`` and its absolute form. Raises UrlError."""
    return target if protocols.of(target) is not None else f"xds://{Path(target).absolute()}"


def resolve(target: str) -> tuple[Any, str]:
    """Return the file system and the path on it that ``target`` names; raises UrlError for an unknown protocol."""
    import fsspec
    from fsspec.core import url_to_fs

    if protocols.of(target) is not None:
        protocols.check(target)
        filesystem, path = url_to_fs(target)
        return filesystem, path
    return fsspec.filesystem("xds"), str(Path(target).absolute())


def complete(incomplete: str) -> list[str]:
    """Return what a shell may complete ``incomplete`` to: names in the folder that it begins.

    Nothing where that is the storage of others than ours, which may take long to answer.
    """
    import importlib.metadata

    if protocols.of(incomplete) is not None:
        ours = {entry.name for entry in importlib.metadata.entry_points(group="xds.backends")}
        if incomplete.partition("://")[0] not in ours | {"file"}:
            return []
    folder, slash, begin = incomplete.rpartition("/")
    try:
        filesystem, path = resolve(f"{folder}{slash}" or ".")
        entries = filesystem.ls(path, detail=True)
    except Exception:  # whatever it is, there is nothing to offer
        return []
    names = []
    for entry in entries:
        name = entry["name"].rpartition("/")[2]
        if name.startswith(begin) and (begin or not name.startswith(".")):
            names.append(f"{folder}{slash}{name}" + ("/" if entry["type"] == "directory" else ""))
    return names


def shown(name: str) -> str:
    """Return ``name`` so that a terminal shows it on one line, whatever bytes it is made of."""
    escaped = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)
    return escaped.encode("utf-8", "backslashreplace").decode()


def human(nbytes: int) -> str:
    """Return a size for people: ``90.9 MB``."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{nbytes} B" if unit == "B" else f"{value:.1f} {unit}"


def print_json(value: Any) -> None:
    """Print one JSON document; what JSON does not have is printed as text."""
    echo(json.dumps(value, indent=2, default=str, ensure_ascii=False))


@contextlib.contextmanager
def progress(title: str, *, enabled: bool = True) -> Iterator[Callable[[int, int], None] | None]:
    """Give a function ``(nbytes_done, nbytes_total)`` that draws a bar on standard error; ``None`` off a terminal."""
    if not enabled or sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)

        def update(nbytes_done: int, nbytes_total: int) -> None:
            bar.update(task, completed=nbytes_done, total=nbytes_total)

        yield update
