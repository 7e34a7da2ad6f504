"""The safetensors header: read, validated natively, kept as NumPy columns. Layer: checkpoint.

Must not import frameworks or the loader. Source: the format's description in the safetensors project
(README, "Format"): eight bytes of little-endian header length N, N bytes of JSON, the data section.

Rules, where the description leaves room: every byte of the data section belongs to exactly one tensor (no gap, no
overlap, no trailing byte); the header may begin with white space and be padded with spaces, never with NUL; a key
that stands twice is an error; unknown keys of a tensor are accepted; a tensor has at most 64 dimensions.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from xds import native
from xds.backend import Handle
from xds.errors import CheckpointError, ShortReadError, TruncatedError
from xds.interop.dtypes import BITS

#: Names of the data types, in the order of the codes that the native reader gives.
DTYPES = tuple(BITS)

#: Header bytes accepted by default; see ``max_header_nbytes`` of :func:`xds.load`.
MAX_HEADER_NBYTES = 256 << 20

_LENGTH_NBYTES = 8

#: How files of other formats begin, and what they are.
_FOREIGN = {
    b"PK\x03\x04": "a zip archive, as torch.save writes it",
    b"GGUF": "a GGUF file",
    **{bytes((0x80, protocol)): "a pickle, as older torch.save writes it" for protocol in (2, 3, 4, 5)},
}


@dataclass(frozen=True, slots=True)
class Header:
    """A validated header. Tensors are in file order: by begin, end, name.

    Attributes:
        path: the file.
        data_start: file offset of the data section, bytes.
        names: the tensors' names.
        begin: u64 per tensor, bytes from ``data_start``.
        end: u64 per tensor, bytes from ``data_start``.
        dtype: u8 per tensor, index into :data:`DTYPES`.
        ndim: u8 per tensor.
        shape_offset: u64 per tensor, index into ``shapes`` of its first dimension.
        shapes: u64, the dimensions of all tensors.
        metadata: the strings of ``__metadata__``.
    """

    path: str
    data_start: int
    names: list[str]
    begin: npt.NDArray[np.uint64]
    end: npt.NDArray[np.uint64]
    dtype: npt.NDArray[np.uint8]
    ndim: npt.NDArray[np.uint8]
    shape_offset: npt.NDArray[np.uint64]
    shapes: npt.NDArray[np.uint64]
    metadata: dict[str, str]

    def __len__(self) -> int:
        return len(self.names)


def read_header(handle: Handle, *, max_header_nbytes: int = MAX_HEADER_NBYTES) -> Header:
    """Read and validate the header of an open file.

    Raises:
        TruncatedError: the file is shorter than its header says; names expected and actual bytes.
        CheckpointError: anything else that is wrong, with the tensor and both numbers; a file of another format.
    """
    path, nbytes = handle.path, handle.nbytes
    if nbytes < _LENGTH_NBYTES:
        raise TruncatedError(
            f"{path}: not a safetensors file: expected at least {_LENGTH_NBYTES} bytes, the file has {nbytes}; "
            "copy or download it again",
            filename=path,
        )
    first = _read(handle, 0, _LENGTH_NBYTES).tobytes()
    json_nbytes = int.from_bytes(first, "little")
    absurd = json_nbytes > max(MAX_HEADER_NBYTES, max_header_nbytes)
    kind = next((words for magic, words in _FOREIGN.items() if first.startswith(magic)), None) if absurd else None
    if kind:
        raise CheckpointError(f"{path} is {kind}; XDS loads safetensors only: convert it first", filename=path)
    # Nothing is allocated by a number from the file before it was checked against the file.
    if json_nbytes > nbytes - _LENGTH_NBYTES:
        what, advice = "truncated, or not a safetensors file", "; copy or download it again"
        if absurd:
            what, advice = "not a safetensors file", ""
        raise (CheckpointError if absurd else TruncatedError)(
            f"{path}: {what}: its first 8 bytes announce a header of {json_nbytes} bytes, so at least "
            f"{_LENGTH_NBYTES + json_nbytes} bytes are expected; the file has {nbytes}{advice}",
            filename=path,
        )
    if json_nbytes < 2:
        raise CheckpointError(
            f"{path}: a safetensors header has at least 2 bytes ('{{}}'), this file announces {json_nbytes}",
            filename=path,
        )
    if json_nbytes > max_header_nbytes:
        raise CheckpointError(
            f"{path}: the header has {json_nbytes} bytes, accepted are at most {max_header_nbytes}; "
            f"if the file is meant to be so, pass max_header_nbytes={json_nbytes}",
            filename=path,
        )
    return parse_header(_read(handle, _LENGTH_NBYTES, json_nbytes), nbytes - _LENGTH_NBYTES - json_nbytes, path)


def _read(handle: Handle, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
    buffer = np.empty(nbytes, np.uint8)
    got = handle.pread_into(buffer.data, offset)
    if got != nbytes:
        raise ShortReadError(
            f"{handle.path}: ended at byte {offset + got} while its header was read, expected {offset + nbytes}; "
            f"it had {handle.nbytes} bytes when it was opened",
            filename=handle.path,
        )
    return buffer


class _Columns(ctypes.Structure):
    # struct xds_safetensors_header in xds/native/src/safetensors_header.h
    _fields_ = (
        ("count", ctypes.c_uint64),
        ("begin", ctypes.c_void_p),
        ("end", ctypes.c_void_p),
        ("shape_offset", ctypes.c_void_p),
        ("name_offset", ctypes.c_void_p),
        ("name_nbytes", ctypes.c_void_p),
        ("dtype", ctypes.c_void_p),
        ("ndim", ctypes.c_void_p),
        ("shapes", ctypes.c_void_p),
        ("shapes_count", ctypes.c_uint64),
        ("names", ctypes.c_void_p),
        ("names_nbytes", ctypes.c_uint64),
        ("metadata", ctypes.c_void_p),
        ("metadata_end", ctypes.c_void_p),
        ("metadata_pairs", ctypes.c_uint64),
        ("error", ctypes.c_char_p),
        ("owner", ctypes.c_void_p),
    )


_OK, _TRUNCATED, _NO_MEMORY = 0, 2, 3


@functools.cache
def _functions() -> tuple[Any, Any]:
    pointer = ctypes.POINTER(_Columns)
    parse = native.function(
        "xds_safetensors_parse", ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, pointer
    )
    return parse, native.function("xds_safetensors_free", None, pointer)


def parse_header(json: npt.NDArray[np.uint8], data_nbytes: int, path: str) -> Header:
    """Parse and validate the JSON of a header; ``data_nbytes`` follow it in the file, ``path`` is for messages.

    Raises as :func:`read_header`.
    """
    parse, free = _functions()
    columns = _Columns()
    status = parse(json.ctypes.data, len(json), data_nbytes, ctypes.byref(columns))
    try:
        if status != _OK:
            message = f"{path}: {columns.error.decode()}"
            if status == _NO_MEMORY:
                raise MemoryError(message)
            if status == _TRUNCATED:
                raise TruncatedError(f"{message}; copy or download it again", filename=path)
            raise CheckpointError(message, filename=path)
        return _header(columns, path, _LENGTH_NBYTES + len(json))
    finally:
        free(ctypes.byref(columns))


def _header(columns: _Columns, path: str, data_start: int) -> Header:
    count = columns.count
    return Header(
        path=path,
        data_start=data_start,
        names=_names(columns),
        begin=_column(columns.begin, count, np.uint64),
        end=_column(columns.end, count, np.uint64),
        dtype=_column(columns.dtype, count, np.uint8),
        ndim=_column(columns.ndim, count, np.uint8),
        shape_offset=_column(columns.shape_offset, count, np.uint64),
        shapes=_column(columns.shapes, columns.shapes_count, np.uint64),
        metadata=_metadata(columns),
    )


def _bytes(address: int | None, nbytes: int) -> bytes:
    return ctypes.string_at(address, nbytes) if address and nbytes else b""


def _column(address: int | None, count: int, dtype: type[Any]) -> npt.NDArray[Any]:
    return np.frombuffer(_bytes(address, count * np.dtype(dtype).itemsize), dtype=dtype)


def _names(columns: _Columns) -> list[str]:
    if columns.count == 0:
        return []
    raw = _bytes(columns.names, columns.names_nbytes)
    names = raw.decode().split("\n")
    if len(names) != columns.count:  # some name has a line feed of its own
        offsets = _column(columns.name_offset, columns.count, np.uint64).tolist()
        sizes = _column(columns.name_nbytes, columns.count, np.uint64).tolist()
        names = [raw[offset : offset + size].decode() for offset, size in zip(offsets, sizes, strict=True)]
    return names


def _metadata(columns: _Columns) -> dict[str, str]:
    ends = _column(columns.metadata_end, 2 * columns.metadata_pairs, np.uint64).tolist()
    raw = _bytes(columns.metadata, ends[-1] if ends else 0)
    texts = [raw[begin:end].decode() for begin, end in zip([0, *ends], ends, strict=False)]
    return dict(zip(texts[::2], texts[1::2], strict=True))
