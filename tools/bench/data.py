"""Checkpoints whose every byte is known: made fast, checked exactly. Layer: tools; imports NumPy alone.

Word ``i`` (64 bits) of the data of shard ``s`` is a hash of ``i`` and ``s``: no file is needed to check one, and no
block of it equals another.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

#: Odd multiplier of the hash (2**64 / golden ratio), as a signed word because torch has no arithmetic on uint64.
MULTIPLIER = 0x9E3779B97F4A7C15 - 2**64
SHARD_STEP = 0x2545F4914F6CDD1D
BLOCK_WORDS = 1 << 20
ITEM_NBYTES = 2  # bf16
MOE_TENSORS = 18_867


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a shard: ``start`` and ``nbytes`` within the shard's data."""

    name: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


def shard_seed(shard: int) -> int:
    """Return the signed 64-bit seed of a shard."""
    value = (shard + 1) * SHARD_STEP % 2**64
    return value - 2**64 if value >= 2**63 else value


def expected_words(first: int, count: int, shard: int) -> npt.NDArray[np.int64]:
    """Return the words ``first`` to ``first + count`` of a shard's data."""
    words = np.arange(first, first + count, dtype=np.int64)
    words += shard_seed(shard)
    words *= np.int64(MULTIPLIER)
    words ^= words >> 29
    return words


def _shapes(layout: str, nbytes: int, scale: float, tensors: int | None) -> list[tuple[int, ...]]:
    """Return the shapes of one shard of ``nbytes``, all bf16."""
    if layout == "one":
        return [(max(1, nbytes // (4096 * ITEM_NBYTES)), 4096)]
    if layout in ("many", "odd"):
        count = tensors if tensors is not None else max(16, round(MOE_TENSORS * scale))
        mean = max(512, nbytes // count // 512 * 512)
        if layout == "many":
            return [(mean // 512, 256)] * count
        random = np.random.default_rng(7)
        elements = random.integers(mean // 4, mean * 3 // 4, size=count) | 1
        return [(int(n),) for n in elements]
    if layout == "shards":
        rows = max(1, round(2048 * min(1.0, scale * 16)))
        shapes: list[tuple[int, ...]] = []
        total = 0
        while total < nbytes:
            for shape in ((rows, 4096), (2 * rows, 4096), (4096,)):
                shapes.append(shape)
                total += int(np.prod(shape)) * ITEM_NBYTES
        return shapes
    raise ValueError(f"no layout {layout!r}; there are one, many, odd, shards")


def make_checkpoint(
    folder: Path,
    layout: str,
    *,
    nbytes: int,
    shards: int = 1,
    scale: float = 1.0,
    tensors: int | None = None,
    threads: int | None = None,
    sync: bool = False,
) -> list[Path]:
    """Write about ``nbytes`` of safetensors in ``shards`` files and return their paths.

    Args:
        folder: made if missing; an index ``model.safetensors.index.json`` is written there as well.
        layout: ``shards`` (16 and 32 MiB tensors and 1-d ones), ``many`` (18,867 equal tensors), ``odd`` (as many, odd
            element counts), ``one`` (one tensor).
        nbytes: bytes of tensor data in all.
        shards: number of files.
        scale: shrinks tensor sizes and counts.
        tensors: number of tensors of ``many`` and ``odd``.
        threads: writers; all CPUs if ``None``.
        sync: wait until the bytes are on the disk (without that, the page cache can't be dropped).
    """
    folder.mkdir(parents=True, exist_ok=True)
    threads = threads or len(os.sched_getaffinity(0))
    paths: list[Path] = []
    weight_map: dict[str, str] = {}
    total = 0
    with ThreadPoolExecutor(threads) as pool:
        for shard in range(shards):
            path = folder / f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
            header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
            end = 0
            for index, shape in enumerate(_shapes(layout, nbytes // shards, scale, tensors)):
                name = f"model.layers.{shard}.{index}.weight"
                size = int(np.prod(shape)) * ITEM_NBYTES
                header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
                weight_map[name] = path.name
                end += size
            text = json.dumps(header, separators=(",", ":")).encode()
            text += b" " * (-len(text) % 8)
            with path.open("wb") as file:
                file.write(len(text).to_bytes(8, "little") + text)
                file.flush()
                fd = file.fileno()
                start = 8 + len(text)
                os.posix_fallocate(fd, 0, start + end)
                jobs = [
                    pool.submit(_write_block, fd, start, word, end, shard)
                    for word in range(0, -(-end // 8), BLOCK_WORDS)
                ]
                for job in jobs:
                    job.result()
                if sync:
                    os.fsync(fd)
            paths.append(path)
            total += end
    index_text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index_text)
    return paths


def _write_block(fd: int, start: int, first_word: int, data_nbytes: int, shard: int) -> None:
    count = min(BLOCK_WORDS, -(-data_nbytes // 8) - first_word)
    view = expected_words(first_word, count, shard).data.cast("B")
    view = view[: data_nbytes - first_word * 8]
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], start + first_word * 8 + done)


def read_entries(path: Path) -> tuple[list[TensorEntry], int]:
    """Return the tensors of a file in the order of their bytes, and where the data starts in the file."""
    with path.open("rb") as file:
        nbytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(nbytes))
    header.pop("__metadata__", None)
    entries = [
        TensorEntry(
            name, tuple(entry["shape"]), entry["data_offsets"][0], entry["data_offsets"][1] - entry["data_offsets"][0]
        )
        for name, entry in header.items()
    ]
    return sorted(entries, key=lambda entry: entry.start), 8 + nbytes


def shard_number(path: Path) -> int:
    """Return which shard a file of :func:`make_checkpoint` is, from 0."""
    return int(path.name.split("-")[1]) - 1
