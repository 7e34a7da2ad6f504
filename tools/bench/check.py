"""Compares loaded arrays with the bytes they must have, every byte, where the arrays are. Layer: tools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.data import BLOCK_WORDS, MULTIPLIER, read_entries, shard_number, shard_seed

#: Words compared at once: on the host few enough to stay in the CPU's cache.
CHUNK_WORDS = {"cuda": BLOCK_WORDS * 16, "cpu": BLOCK_WORDS // 8}


class _Span:
    """Device memory of some array as unsigned bytes, for torch."""

    def __init__(self, address: int, nbytes: int, owner: Any) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


def byte_view(array: Any) -> Any:
    """Return a flat torch uint8 tensor over the memory of a torch, NumPy or CuPy array."""
    import numpy as np
    import torch

    if isinstance(array, torch.Tensor):
        return array.detach().contiguous().reshape(-1).view(torch.uint8)
    if isinstance(array, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    interface = array.__cuda_array_interface__
    if interface.get("strides") is not None:
        raise ValueError("the loader gave an array that is not contiguous")
    return torch.as_tensor(_Span(interface["data"][0], int(array.nbytes), array), device="cuda")


def _compare(flat: Any, shard: int) -> int:
    """Return how many bytes of ``flat`` differ from the start of a shard's data."""
    import torch

    wrong = 0
    step = CHUNK_WORDS[flat.device.type]
    for first in range(0, -(-flat.numel() // 8), step):
        count = min(step, -(-flat.numel() // 8) - first)
        words = torch.arange(first, first + count, dtype=torch.int64, device=flat.device)
        words += shard_seed(shard)
        words *= MULTIPLIER
        words ^= words >> 29
        got = flat[first * 8 : (first + count) * 8]
        expected = words.view(torch.uint8)[: got.numel()]
        if not torch.equal(expected, got):
            wrong += int((expected != got).sum())
    return wrong


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Outcome of a check: ``problem`` is ``None`` if every byte is right; ``raw`` tensors came as plain bytes."""

    nbytes: int
    tensors: int
    problem: str | None
    raw: int = 0


def check_tensors(tensors: Mapping[str, Any], paths: list[Path]) -> CheckResult:
    """Check names, shapes and every byte of all tensors of ``paths``."""
    import torch

    nbytes = count = raw = 0
    for path in paths:
        entries, _ = read_entries(path)
        views = []
        for entry in entries:
            if entry.name not in tensors:
                return CheckResult(nbytes, count, f"{entry.name} is missing")
            array = tensors[entry.name]
            if "uint8" in str(array.dtype) and tuple(array.shape) == (entry.nbytes,):
                raw += 1  # a framework without bf16
            elif tuple(array.shape) != entry.shape:
                return CheckResult(nbytes, count, f"{entry.name}: shape {tuple(array.shape)}, expected {entry.shape}")
            view = byte_view(array)
            if view.numel() != entry.nbytes:
                return CheckResult(nbytes, count, f"{entry.name}: {view.numel()} bytes, expected {entry.nbytes}")
            views.append(view)
        flat = torch.cat(views) if len(views) > 1 else views[0]
        wrong = _compare(flat, shard_number(path))
        nbytes += sum(entry.nbytes for entry in entries)
        count += len(entries)
        if wrong:
            return CheckResult(nbytes, count, f"{path.name}: {wrong} bytes are wrong")
    if len(tensors) != count:
        return CheckResult(nbytes, count, f"{len(tensors)} tensors came, {count} are in the files")
    return CheckResult(nbytes, count, None, raw)


def check_raw(buffers: Mapping[str, Any], paths: list[Path]) -> CheckResult:
    """Check whole files read as plain bytes: ``buffers`` has one array a path."""
    nbytes = 0
    for path in paths:
        _, start = read_entries(path)
        flat = byte_view(buffers[str(path)])
        size = path.stat().st_size
        if flat.numel() != size:
            return CheckResult(nbytes, 0, f"{path.name}: {flat.numel()} bytes came, {size} are in the file")
        # The data starts at any multiple of 8; a copy makes the words aligned for every device.
        wrong = _compare(flat[start:].clone(), shard_number(path))
        nbytes += size - start
        if wrong:
            return CheckResult(nbytes, 0, f"{path.name}: {wrong} bytes are wrong")
    return CheckResult(nbytes, len(paths), None)
