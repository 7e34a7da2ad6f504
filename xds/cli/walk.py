"""``xds find`` and ``xds du``: what lies below a folder of any fsspec URL. Layer: top."""

from __future__ import annotations

import fnmatch
import posixpath
import sys
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any

import typer

from xds.cli.targets import complete, human, print_json, resolve, shown

Targets = Annotated[
    list[str] | None,
    typer.Argument(metavar="[URL...]", help="URLs or paths; without any, the current folder.", autocompletion=complete),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class Kind(StrEnum):
    """What ``xds find --type`` takes."""

    FILE = "file"
    DIRECTORY = "directory"


class _Errors:
    """Folders that cannot be listed: each is told at once, and makes the exit code 1 in the end."""

    def __init__(self) -> None:
        self._any = False

    def __call__(self, error: BaseException) -> None:
        from xds.cli.errors import describe

        self._any = True
        typer.echo(f"xds: error: {describe(error)}", err=True)

    def end(self) -> None:
        if self._any:
            raise typer.Exit(1)


def _entries(target: str, maxdepth: int | None, errors: _Errors) -> Iterator[dict[str, Any]]:
    """Yield what ``target`` is, then all that is below, folder by folder."""
    filesystem, path = resolve(target)
    top = filesystem.info(path)
    yield top
    if top["type"] != "directory" or maxdepth == 0:
        return
    for _, folders, files in filesystem.walk(path, maxdepth=maxdepth, detail=True, on_error=errors):
        for name in sorted({**folders, **files}):
            if name:  # the folder itself, on storage where a folder may be a file too
                yield folders[name] if name in folders else files[name]


def find(
    targets: Targets = None,
    name: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Only such names (*.parquet); may stand many times.", show_default=False),
    ] = None,
    kind: Annotated[Kind | None, typer.Option("--type", "-t", help="Only these.", show_default=False)] = None,
    maxdepth: Annotated[
        int | None, typer.Option(min=0, help="How many folders deep to go; 0: URL alone.", show_default=False)
    ] = None,
    print0: Annotated[
        bool, typer.Option("--print0", "-0", help="End names with NUL, all their bytes as they are (xargs -0).")
    ] = False,
    json: Json = False,
) -> None:
    """List all that lies below a folder, the folder itself first. Links to folders are not entered."""
    errors = _Errors()
    found = []
    for target in targets or ["."]:
        for entry in _entries(target, maxdepth, errors):
            base = posixpath.basename(entry["name"].rstrip("/"))
            if name and not any(fnmatch.fnmatchcase(base, pattern) for pattern in name):
                continue
            if kind and entry["type"] != kind:
                continue
            if json:
                found.append(entry)
            elif print0:
                sys.stdout.buffer.write(entry["name"].encode("utf-8", "surrogateescape") + b"\0")
            else:
                typer.echo(shown(entry["name"]) + ("/" if entry["type"] == "directory" else ""))
    if json:
        print_json(found)
    errors.end()


def _sizes(target: str, maxdepth: int | None, errors: _Errors) -> dict[str, int]:
    """Return the bytes below each folder, deepest first, ``target`` last; folders below ``maxdepth`` are left out."""
    filesystem, path = resolve(target)
    top = filesystem.info(path)
    if top["type"] != "directory":
        return {top["name"]: top.get("size") or 0}
    below: dict[str, int] = {}
    shown_sizes: dict[str, int] = {}
    root = path.rstrip("/")
    for folder, folders, files in filesystem.walk(path, topdown=False, detail=True, on_error=errors):
        nbytes = sum(entry.get("size") or 0 for entry in files.values())
        nbytes += sum(below.pop(entry["name"].rstrip("/"), 0) for entry in folders.values())
        key = folder.rstrip("/")
        below[key] = nbytes
        if maxdepth is None or len(key) == len(root) or key[len(root) + 1 :].count("/") < maxdepth:
            shown_sizes[folder] = nbytes
    return shown_sizes


def du(
    targets: Targets = None,
    readable: Annotated[bool, typer.Option("--human", "-h", help="Sizes as 90.9 MB.")] = False,
    total: Annotated[bool, typer.Option("--total", "-c", help="A line with the sum over all URLs.")] = False,
    maxdepth: Annotated[
        int | None, typer.Option("--maxdepth", "-d", min=0, help="How many folders deep to show.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Show the bytes of the files below each folder.

    Sizes are those of the files, not of the blocks that they take.
    """
    errors = _Errors()
    sizes: list[dict[str, Any]] = []
    sum_nbytes = 0
    for target in targets or ["."]:
        entries = _sizes(target, maxdepth, errors)
        sizes += [{"name": name, "nbytes": nbytes} for name, nbytes in entries.items()]
        sum_nbytes += list(entries.values())[-1] if entries else 0
    if json:
        print_json({"entries": sizes, "total": sum_nbytes} if total else sizes)
    else:
        for entry in [*sizes, *([{"name": "total", "nbytes": sum_nbytes}] if total else [])]:
            size = human(entry["nbytes"]) if readable else str(entry["nbytes"])
            typer.echo(f"{size:>12}  {shown(entry['name'])}")
    errors.end()
