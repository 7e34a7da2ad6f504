"""``xds ls``, ``xds stat``, ``xds cat``: names and bytes of any fsspec URL. Layer: top."""

from __future__ import annotations

import datetime
import sys
from typing import Annotated, Any

import typer

from xds.cli.targets import complete, human, print_json, progress, resolve, shown

_CHUNK_NBYTES = 8 << 20

Targets = Annotated[list[str], typer.Argument(metavar="URL...", help="URLs or paths.", autocompletion=complete)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _when(entry: dict[str, Any]) -> str:
    moment = entry.get("mtime", entry.get("LastModified", entry.get("created")))
    if isinstance(moment, int | float):
        moment = datetime.datetime.fromtimestamp(moment, tz=datetime.UTC)
    return moment.strftime("%Y-%m-%d %H:%M:%S") if isinstance(moment, datetime.datetime) else "-"


def ls(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[URL...]", help="URLs or paths; without any, the current folder.", autocompletion=complete
        ),
    ] = None,
    long: Annotated[bool, typer.Option("--long", "-l", help="Type, size and time (UTC) too.")] = False,
    json: Json = False,
) -> None:
    """List a folder, or show that a file is there."""
    entries: list[dict[str, Any]] = []
    for target in targets or ["."]:
        filesystem, path = resolve(target)
        entries += filesystem.ls(path, detail=True)
    if json:
        print_json(entries)
        return
    for entry in entries:
        name = shown(str(entry["name"])) + ("/" if entry["type"] == "directory" else "")
        if long:
            size = human(entry["size"]) if entry.get("size") is not None else "-"
            typer.echo(f"{entry['type']:<9} {size:>10}  {_when(entry):<19}  {name}")
        else:
            typer.echo(name)


def stat(targets: Targets, json: Json = False) -> None:
    """Show what is known about a file: size, type, time."""
    infos = []
    for target in targets:
        filesystem, path = resolve(target)
        infos.append(filesystem.info(path))
    if json:
        print_json(infos[0] if len(infos) == 1 else infos)
        return
    for number, info in enumerate(infos):
        if number:
            typer.echo()
        for key, value in info.items():
            text = f"{value} ({human(value)})" if key == "size" and isinstance(value, int) else str(value)
            text = f"{value} ({_when(info)} UTC)" if key == "mtime" else text
            typer.echo(f"{key:<12} {shown(text)}")


def cat(
    targets: Targets,
    start: Annotated[
        int | None, typer.Option(help="First byte; counts from the end if negative, as in Python.", show_default=False)
    ] = None,
    end: Annotated[
        int | None, typer.Option(help="Byte after the last; from the end if negative.", show_default=False)
    ] = None,
) -> None:
    """Write the bytes of files to standard output."""
    from xds.errors import ShortReadError
    from xds.plan import resolve_range

    output = sys.stdout.buffer
    for target in targets:
        filesystem, path = resolve(target)
        with filesystem.open(path, "rb", block_size=_CHUNK_NBYTES) as file:
            position, stop = resolve_range(start, end, file.size)
            file.seek(position)
            total = stop - position
            left = total
            # A bar and the bytes on one terminal would make each other unreadable.
            with progress(shown(path), enabled=not sys.stdout.isatty() and total > _CHUNK_NBYTES) as update:
                while left:
                    piece = file.read(min(left, _CHUNK_NBYTES))
                    if not piece:
                        raise ShortReadError(
                            f"{path}: ended {left} bytes before byte {stop}; it shrank while it was read",
                            filename=path,
                        )
                    output.write(piece)
                    left -= len(piece)
                    if update:
                        update(total - left, total)
    output.flush()
