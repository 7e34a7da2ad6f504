"""Which files make up a checkpoint: one file, an index, or a folder. Layer: checkpoint.

Must not import interop or the loader. Paths are joined as text and links are never resolved: in the cache of
Hugging Face the shards are links that lie beside the index, while the blobs they lead to have other names.
"""

from __future__ import annotations

import contextlib
import errno
import json
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xds.backend import Backend, Handle
from xds.checkpoint.safetensors import Header
from xds.errors import CheckpointError, ShortReadError, XdsError
from xds.reads import open_handle

STANDARD_INDEX = "model.safetensors.index.json"
_INDEX_SUFFIX = ".index.json"
_MAX_INDEX_NBYTES = 256 << 20
_KINDS = {"directory": "a folder", "link": "a link that leads nowhere"}
#: The longest name shown whole in a message.
_SHOWN = 300
#: What the kernel says of a name that leads nowhere, or that it will not follow.
_NO_SUCH = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


@dataclass(frozen=True, slots=True)
class Sources:
    """The files of a checkpoint.

    Attributes:
        files: paths of the safetensors files, sorted, each once.
        index: path of the index file, or ``None``.
        shard_of: tensor name to position in ``files``, as the index says; ``None`` without an index.
    """

    files: tuple[str, ...]
    index: str | None = None
    shard_of: Mapping[str, int] | None = None


def find(backend: Backend, path: str) -> Sources:
    """Return the files of the checkpoint at ``path``: a safetensors file, an index (``*.index.json``) or a folder.

    In a folder: ``model.safetensors.index.json``, else the only ``*.index.json`` (those of ``.bin`` files do not
    count), else all ``*.safetensors``.

    Raises:
        CheckpointError: a folder without any, or with several indexes; an index that is not valid.
        FileNotFoundError: no such path.
    """
    if backend.info(path)["type"] == "directory":
        return _find_in_folder(backend, path)
    return _from_index(backend, path) if path.endswith(_INDEX_SUFFIX) else Sources((path,))


def _find_in_folder(backend: Backend, folder: str) -> Sources:
    entries = backend.ls(folder)
    names = sorted(_basename(entry["name"]) for entry in entries if entry["type"] != "directory")
    indexes = [name for name in names if name.endswith(_INDEX_SUFFIX) and not name.endswith(".bin" + _INDEX_SUFFIX)]
    if STANDARD_INDEX in indexes:
        return _from_index(backend, _join(folder, STANDARD_INDEX))
    if len(indexes) > 1:
        raise CheckpointError(
            f"{folder}: several index files and none is {STANDARD_INDEX}: {', '.join(indexes)}; name the one you want",
            filename=folder,
        )
    if indexes:
        return _from_index(backend, _join(folder, indexes[0]))
    files = tuple(_join(folder, name) for name in names if name.endswith(".safetensors"))
    if not files:
        raise CheckpointError(
            f"{folder}: no *.safetensors and no *.index.json in this folder{_snapshot(backend, folder, entries)}",
            filename=folder,
        )
    return Sources(files)


def _snapshot(backend: Backend, folder: str, entries: Sequence[Mapping[str, Any]]) -> str:
    """Return a hint for the folder of a repository in the cache of Hugging Face, else nothing."""
    if not any(_basename(entry["name"]) == "snapshots" and entry["type"] == "directory" for entry in entries):
        return ""
    inside = [entry for entry in backend.ls(_join(folder, "snapshots")) if entry["type"] == "directory"]
    newest = max(inside, key=lambda entry: float(entry["mtime"]), default=None)
    return f"; did you mean {newest['name']}?" if newest else ""


def _basename(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _join(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}"


def _from_index(backend: Backend, path: str) -> Sources:
    weight_map = _weight_map(_read(backend, path), path)
    folder = path.rpartition("/")[0]
    shards = sorted(set(weight_map.values()))
    # The first tensor of each file, for messages.
    tensor_of = {shard: name for name, shard in reversed(weight_map.items())}

    def where(shard: str) -> str:
        return f"{path}: weight_map gives tensor {_shown(tensor_of[shard])} the file {_shown(shard)}"

    for shard in shards:
        wrong = _wrong_name(shard)
        if wrong is not None:
            raise CheckpointError(f"{where(shard)}{wrong}", filename=path)
    troubles = {shard: _trouble(backend, _join(folder, shard)) for shard in shards}
    bad = [shard for shard in shards if troubles[shard]]
    if bad:
        count = f" ({len(bad)} of its {len(shards)} files are missing)" if len(shards) > 1 else ""
        raise CheckpointError(
            f"{where(bad[0])}, {troubles[bad[0]]}{count}; copy or download what is missing", filename=path
        )
    position = {shard: number for number, shard in enumerate(shards)}
    return Sources(
        files=tuple(_join(folder, shard) for shard in shards),
        index=path,
        shard_of={name: position[shard] for name, shard in weight_map.items()},
    )


def _read(backend: Backend, path: str) -> bytearray:
    handle = open_handle(backend, path)
    try:
        if handle.nbytes > _MAX_INDEX_NBYTES:
            raise CheckpointError(
                f"{path}: an index of {handle.nbytes} bytes; at most {_MAX_INDEX_NBYTES} are accepted", filename=path
            )
        buffer = bytearray(handle.nbytes)
        got = handle.pread_into(memoryview(buffer), 0)
        if got != len(buffer):
            raise ShortReadError(f"{path}: ended at byte {got}, expected {len(buffer)}", filename=path)
        handle.check_unchanged()
        return buffer
    finally:
        handle.close()


def _weight_map(text: bytearray, path: str) -> dict[str, str]:
    def once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) != len(pairs):
            seen: set[str] = set()
            for name, _ in pairs:
                if name in seen:
                    raise CheckpointError(f"{path}: duplicate key {_shown(name)} in the index", filename=path)
                seen.add(name)
        return members

    try:
        index = json.loads(text.decode(), object_pairs_hook=once)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:  # ValueError: also of a number of thousands of digits
        raise CheckpointError(f"{path}: the index is not valid JSON: {error}", filename=path) from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{path}: an index needs a 'weight_map', an object of tensor names and file names", filename=path
        )
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise CheckpointError(
                f"{path}: weight_map gives tensor {_shown(name)} the file {_shown(shard)}; expected a string",
                filename=path,
            )
    return weight_map


def _shown(value: object) -> str:
    return _short(repr(value))


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"


def _wrong_name(shard: str) -> str | None:
    outside = shard.startswith("/") or ".." in shard.split("/") or not shard.strip("./")
    if outside or "\0" in shard or not _is_text(shard):
        return "; expected the name of a file beside the index"
    return None if shard.endswith(".safetensors") else ", which is no safetensors file"


def _trouble(backend: Backend, file: str) -> str | None:
    """Return what is wrong with a shard that is no file, or ``None``."""
    try:
        kind = backend.info(file)["type"]
    except OSError as error:
        if error.errno not in _NO_SUCH:
            raise
        reason = "" if error.errno == errno.ENOENT else f" ({error.strerror})"
        return f"and there is no {_short(file)}{reason}"
    return None if kind == "file" else f"which is {_KINDS.get(kind, 'no regular file')}"


def _is_text(name: str) -> bool:
    # JSON can hold half of a surrogate pair, which no file name can.
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def open_files(backend: Backend, sources: Sources) -> list[Handle]:
    """Open all files; none stays open if one cannot be.

    Raises:
        XdsError: more files than this process may have open (``EMFILE``).
        OSError: as of the backend.
    """
    with contextlib.ExitStack() as stack:
        handles: list[Handle] = []
        for file in sources.files:
            try:
                handle = open_handle(backend, file)
            except OSError as error:
                if error.errno != errno.EMFILE:
                    raise
                soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
                raise XdsError(
                    f"{file}: too many open files: {sources.index or 'the checkpoint'} has {len(sources.files)} files, "
                    f"which are open together, and this process may open {soft} in all; {len(handles)} of them were "
                    f"open. Raise the limit with `ulimit -n` (here up to {hard}) or resource.setrlimit",
                    errno=errno.EMFILE,
                    filename=file,
                ) from error
            stack.callback(handle.close)
            handles.append(handle)
        stack.pop_all()
        return handles


def check_shards(sources: Sources, headers: Sequence[Header], *, strict: bool) -> list[set[str]]:
    """Compare the headers with the index and with each other; return per file the names that it must not provide.

    A tensor that its shard has and the index does not is an error if ``strict``; else it is taken, except where the
    index gives its name another shard.

    Raises CheckpointError: a tensor of the index that its shard lacks, one that two shards have.
    """
    skipped: list[set[str]] = [set() for _ in headers]
    if sources.shard_of is None:
        if len(headers) > 1:
            _check_unique(headers)
        return skipped
    expected: list[set[str]] = [set() for _ in headers]
    for name, number in sources.shard_of.items():
        expected[number].add(name)
    for number, header in enumerate(headers):
        present = set(header.names)
        missing = expected[number] - present
        if missing:
            raise CheckpointError(
                f"{header.path}: {sources.index} says that tensor {min(missing)!r} is here, and it is not"
                + (f" ({len(missing)} tensors are missing)" if len(missing) > 1 else ""),
                filename=header.path,
            )
        extra = present - expected[number]
        if extra and strict:
            raise CheckpointError(
                f"{header.path}: tensor {min(extra)!r} is not in {sources.index} for this file"
                + (f" ({len(extra)} such tensors)" if len(extra) > 1 else "")
                + "; strict=False accepts it",
                filename=header.path,
            )
        skipped[number] = {name for name in extra if name in sources.shard_of}
    _check_unique(headers, skipped)
    return skipped


def _check_unique(headers: Sequence[Header], skipped: Sequence[set[str]] | None = None) -> None:
    owner: dict[str, str] = {}
    for number, header in enumerate(headers):
        names: set[str] = set(header.names)
        if skipped is not None:
            names -= skipped[number]
        twice = names & owner.keys()
        if twice:
            name = min(twice)
            raise CheckpointError(
                f"{header.path}: tensor {name!r} is in {owner[name]} too; "
                "name one of the files, or an index that says which is meant",
                filename=header.path,
            )
        owner.update(dict.fromkeys(names, header.path))
