"""``xds ls``, ``xds stat``, ``xds cat``: names and bytes of any fsspec URL. Layer: top."""

from __future__ import annotations

import datetime
import errno
import stat as status
import sys
from typing import Annotated, Any

import typer

from xds.cli.errors import Attempts, echo, output
from xds.cli.targets import complete, human, print_json, progress, resolve, shown

_CHUNK_NBYTES = 8 << 20
_TIMES = ("mtime", "LastModified", "created")

Targets = Annotated[list[str], typer.Argument(metavar="URL...", help="URLs or paths.", autocompletion=complete)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON: an array, an entry a file.")]


def _when(moment: Any) -> str:
    if isinstance(moment, int | float):
        moment = datetime.datetime.fromtimestamp(moment, tz=datetime.UTC)
    return moment.strftime("%Y-%m-%d %H:%M:%S") if isinstance(moment, datetime.datetime) else "-"


def _entries(filesystem: Any, path: str) -> list[dict[str, Any]]:
    """Return what a folder holds, or a file; of what is not there, the names that it matches as a pattern."""
    try:
        entries: list[dict[str, Any]] = filesystem.ls(path, detail=True)
    except FileNotFoundError:
        if not set(path) & set("*?["):
            raise
        entries = list(filesystem.glob(path, detail=True).values())
        if not entries:
            raise FileNotFoundError(errno.ENOENT, "No name matches this pattern", path) from None
    return entries


def _line(entry: dict[str, Any]) -> str:
    """Return the line of ``ls -l``."""
    size = human(entry["size"]) if entry.get("size") is not None else "-"
    moment = next((entry[key] for key in _TIMES if key in entry), None)
    text = f"{entry['type']:<9} {size:>10}  {_when(moment):<19}  {_name(entry)}"
    return f"{text} -> {shown(str(entry['destination']))}" if entry.get("destination") else text


def _name(entry: dict[str, Any]) -> str:
    return shown(str(entry["name"])) + ("/" if entry["type"] == "directory" else "")


def ls(
    context: typer.Context,
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[URL...]", help="URLs, paths or patterns; without any, this folder.", autocompletion=complete
        ),
    ] = None,
    long: Annotated[bool, typer.Option("--long", "-l", help="Type, size, time (UTC), where links lead.")] = False,
    for_people: Annotated[bool, typer.Option("-h", help="Sizes for people, as they are anyway.")] = False,
    json: Json = False,
) -> None:
    """List a folder, or show that a file is there."""
    attempts = Attempts(context)
    entries: list[dict[str, Any]] = []
    for target in targets or ["."]:
        with attempts.attempt():
            filesystem, path = resolve(target)
            found = _entries(filesystem, path)
            entries += found
            attempts.values += found
    if json:
        print_json(attempts.values)
    else:
        for entry in entries:
            echo(_line(entry) if long else _name(entry))
    attempts.finish()


def _detail(key: str, value: Any) -> str:
    if key == "size" and isinstance(value, int):
        return f"{value} ({human(value)})"
    if key in _TIMES and _when(value) != "-":
        return f"{_when(value)} UTC"
    if key == "mode" and isinstance(value, int):
        return f"{status.filemode(value)} ({status.S_IMODE(value):04o})"
    return shown(str(value))


def stat(context: typer.Context, targets: Targets, json: Json = False) -> None:
    """Show what is known about a file: size, type, time."""
    attempts = Attempts(context)
    infos: list[dict[str, Any]] = []
    for target in targets:
        with attempts.attempt():
            filesystem, path = resolve(target)
            infos.append(filesystem.info(path))
            attempts.values.append(infos[-1])
    if json:
        print_json(attempts.values)
    else:
        for number, info in enumerate(infos):
            if number:
                echo()
            for key, value in info.items():
                if key != "identity":  # says nothing that the others do not
                    echo(f"{key:<12} {_detail(key, value)}")
    attempts.finish()


def cat(
    context: typer.Context,
    targets: Targets,
    start: Annotated[
        int | None, typer.Option(help="First byte; counts from the end if negative, as in Python.", show_default=False)
    ] = None,
    end: Annotated[
        int | None, typer.Option(help="Byte after the last; from the end if negative.", show_default=False)
    ] = None,
) -> None:
    """Write the bytes of files to standard output."""
    attempts = Attempts(context)
    for target in targets:
        with attempts.attempt():
            _copy(target, start, end)
    with output():
        sys.stdout.buffer.flush()
    attempts.finish()


def _copy(target: str, start: int | None, end: int | None) -> None:
    from xds.errors import ShortReadError
    from xds.plan import resolve_range

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
                        f"{path}: ended {left} bytes before byte {stop}; it shrank while it was read", filename=path
                    )
                with output():
                    sys.stdout.buffer.write(piece)
                left -= len(piece)
                if update:
                    update(total - left, total)
