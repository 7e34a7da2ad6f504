"""Writes safetensors files byte by byte, good ones and bad ones, for the tests."""

from __future__ import annotations

import json
import math
import os
import struct
from pathlib import Path

import numpy as np

BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip


def entry(dtype: str, shape: list[int], begin: int, end: int) -> str:
    return json.dumps({"dtype": dtype, "shape": shape, "data_offsets": [begin, end]})


def raw(header: str | bytes, data: bytes = b"", *, length: int | None = None) -> bytes:
    """The bytes of a file; ``length`` overrides the length that its first eight bytes announce."""
    text = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def one(dtype: str, shape: list[int], data: bytes, *, end: int | None = None, name: str = "t") -> bytes:
    """A file with one tensor."""
    return raw(f"{{{json.dumps(name)}: {entry(dtype, shape, 0, len(data) if end is None else end)}}}", data)


def nbytes_of(dtype: str, shape: tuple[int, ...] | list[int]) -> int:
    return math.prod(shape) * BITS[dtype] // 8


def noise(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8).tobytes()


def values(dtype: str, shape: tuple[int, ...], seed: int = 0) -> bytes:
    """Random bytes that are valid values of ``dtype`` (a BOOL is 0 or 1)."""
    data = noise(nbytes_of(dtype, shape), seed)
    return bytes(byte & 1 for byte in data) if dtype == "BOOL" else data


def write(
    path: Path,
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]],
    *,
    metadata: dict[str, str] | None = None,
    pad_to: int | None = None,
) -> Path:
    """Write a good file: name to (dtype, shape, bytes), data in the order given; ``pad_to`` bytes of header."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        assert len(data) == nbytes_of(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    if pad_to is not None:
        assert len(text) <= pad_to
        text = text.ljust(pad_to)
    path.write_bytes(raw(text, b"".join(data for _, _, data in tensors.values())))
    return path


def write_index(folder: Path, weight_map: dict[str, object], name: str = "model.safetensors.index.json") -> Path:
    path = folder / name
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return path


def drop_cache(path: Path) -> None:
    """Ask the kernel to forget the pages of a file, so that it is cold."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def stored_bytes(array: object) -> bytes:
    """The bytes of a NumPy array or a torch tensor on the host, whatever its type."""
    if hasattr(array, "untyped_storage"):
        import torch

        if array.numel() == 0:
            return b""
        return array.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return np.asarray(array).tobytes()
