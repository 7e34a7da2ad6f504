"""``xds cp``: files and folders from any fsspec URL to any other. Layer: top."""

from __future__ import annotations

import posixpath
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from xds import protocols
from xds.cli.targets import complete, human, print_json, progress, resolve, shown

_CHUNK_NBYTES = 8 << 20

Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class _Item:
    """One file to copy; ``nbytes`` is ``None`` where the source does not say."""

    source: Any
    source_path: str
    target: Any
    target_path: str
    nbytes: int | None

    def as_dict(self) -> dict[str, Any]:
        return {
            "source": self.source.unstrip_protocol(self.source_path),
            "destination": self.target.unstrip_protocol(self.target_path),
            "nbytes": self.nbytes,
        }


def _writable(target: str) -> tuple[Any, str]:
    """Return the file system to write through, and the path.

    That is ``xds://`` for ``file://`` too: fsspec's own local files are not put in place atomically, if they lie on
    another file system than the folder for temporary files.
    """
    import fsspec

    filesystem, path = resolve(target)
    protocol = filesystem.protocol
    if protocols.of(target) is not None and "file" in ((protocol,) if isinstance(protocol, str) else protocol):
        return fsspec.filesystem("xds"), path
    return filesystem, path


def _plan(sources: list[str], destination: str, recursive: bool) -> tuple[list[_Item], list[tuple[Any, str]]]:
    """Return the files to copy and the folders to make before, in order; nothing is written yet.

    Raises:
        OSError: what is to be copied is not there, or cannot be copied there.
    """
    target, target_path = _writable(destination)
    is_folder = target.isdir(target_path)
    folders: list[tuple[Any, str]] = []
    if not is_folder and destination.endswith("/"):
        folders.append((target, target_path))
        is_folder = True
    if len(sources) > 1 and not is_folder:
        raise NotADirectoryError(f"{destination}: several sources need an existing folder, or a name that ends in /")
    items: list[_Item] = []
    for word in sources:
        source, path = resolve(word)
        info = source.info(path)
        place = posixpath.join(target_path, posixpath.basename(path.rstrip("/"))) if is_folder else target_path
        if info["type"] != "directory":
            items.append(_Item(source, path, target, place, info.get("size")))
            continue
        if not recursive:
            raise IsADirectoryError(f"{word}: is a folder; --recursive copies it")
        inside = f"{place.rstrip('/')}/".startswith(f"{path.rstrip('/')}/")
        if inside and source.unstrip_protocol(path) == target.unstrip_protocol(path):
            raise OSError(f"{word}: cannot be copied into itself, {destination}")
        folders.append((target, place))
        # Not find(), which leaves out what it cannot list.
        for folder, inner, files in source.walk(path, detail=True, on_error="raise"):
            here = posixpath.join(place, folder[len(path.rstrip("/")) :].strip("/"))
            folders += [(target, posixpath.join(here, name)) for name in sorted(inner)]
            items += [
                _Item(source, entry["name"], target, posixpath.join(here, name), entry.get("size"))
                for name, entry in sorted(files.items())
                if name  # the folder itself, on storage where a folder may be a file too
            ]
    for item in items:
        if item.source is item.target and item.source_path == item.target_path:
            raise OSError(f"{item.source_path}: source and destination are the same file")
    return items, folders


def _copy_one(item: _Item, advance: Advance) -> int:
    """Copy one file and return its bytes; whatever fails, what was at the destination before stays."""
    if item.source is item.target:
        item.source.cp_file(item.source_path, item.target_path)
        advance(item.nbytes or 0)
        return item.nbytes or 0
    from xds.errors import ShortReadError

    nbytes = 0
    with (
        item.source.open(item.source_path, "rb", block_size=_CHUNK_NBYTES) as reader,
        # Nothing shows under its name before the transaction ends well.
        item.target.transaction,
        item.target.open(item.target_path, "wb") as writer,
    ):
        while piece := reader.read(_CHUNK_NBYTES):
            writer.write(piece)
            nbytes += len(piece)
            advance(len(piece))
        if item.nbytes is not None and nbytes < item.nbytes:
            raise ShortReadError(
                f"{item.source_path}: ended after {nbytes} of {item.nbytes} bytes; it shrank while it was read",
                filename=item.source_path,
            )
    return nbytes


def cp(
    sources: Annotated[
        list[str], typer.Argument(metavar="SRC...", help="URLs or paths of what to copy.", autocompletion=complete)
    ],
    destination: Annotated[
        str,
        typer.Argument(
            metavar="DST",
            help="URL or path: a name, or a folder (it exists, or ends in /) to copy into.",
            autocompletion=complete,
        ),
    ],
    recursive: Annotated[
        bool, typer.Option("--recursive", "-r", help="Copy folders with all that is in them.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Copy files and folders; each file appears under its name only when all of it is there."""
    begin = time.perf_counter()
    items, folders = _plan(sources, destination, recursive)
    total = sum(item.nbytes or 0 for item in items)
    for filesystem, path in folders:
        filesystem.makedirs(path, exist_ok=True)
    done = []
    title = shown(posixpath.basename(items[0].source_path)) if len(items) == 1 else f"{len(items)} files"
    with progress(title, enabled=not json) as update:
        moved = 0

        def advance(nbytes: int) -> None:
            nonlocal moved
            moved += nbytes
            if update:
                update(moved, max(total, moved))

        for item in items:
            done.append({**item.as_dict(), "nbytes": _copy_one(item, advance)})
    seconds = time.perf_counter() - begin
    nbytes = sum(entry["nbytes"] for entry in done)
    if json:
        values = {
            "files": len(done),
            "nbytes": nbytes,
            "seconds": seconds,
            "gb_per_s": nbytes / seconds / 1e9,
            "copied": done,
        }
        print_json(values)
        return
    files = "1 file" if len(done) == 1 else f"{len(done)} files"
    typer.echo(f"{files}, {human(nbytes)} in {seconds:.2f} s ({nbytes / seconds / 1e9:.2f} GB/s)")
