"""The tensors of all files of a checkpoint as columns, and which of them are wanted. Layer: checkpoint; pure.

Must not import frameworks or the loader.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from xds.checkpoint.safetensors import DTYPES, Header
from xds.errors import CheckpointError
from xds.interop.base import Places

#: Which tensors: all, these names, or those for which a function of the name is true.
Names = Iterable[str] | Callable[[str], bool] | None


class TensorNotFoundError(CheckpointError, KeyError):
    """A name that the checkpoint does not have."""

    __str__ = CheckpointError.__str__


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One stored tensor.

    Attributes:
        name: its name.
        dtype: its stored type by its safetensors name, such as ``BF16``.
        shape: its dimensions, in values.
        nbytes: its size in the file.
        file: path of the file.
        offset: where it begins in the file, bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str
    offset: int


@dataclass(frozen=True, slots=True)
class Table:
    """All tensors, file after file, in file order; a column each.

    Attributes:
        files: paths.
        names: per tensor.
        file: u32 per tensor, index into ``files``.
        offset: u64 per tensor, where it begins in its file, bytes.
        nbytes: u64 per tensor.
        dtype: u8 per tensor, index into :data:`~xds.checkpoint.safetensors.DTYPES`.
        ndim: u8 per tensor.
        shape_offset: u64 per tensor, index into ``shapes``.
        shapes: u64, the dimensions of all tensors.
    """

    files: tuple[str, ...]
    names: list[str]
    file: npt.NDArray[np.uint32]
    offset: npt.NDArray[np.uint64]
    nbytes: npt.NDArray[np.uint64]
    dtype: npt.NDArray[np.uint8]
    ndim: npt.NDArray[np.uint8]
    shape_offset: npt.NDArray[np.uint64]
    shapes: npt.NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.names)

    def take(self, rows: npt.NDArray[np.intp]) -> Table:
        """Return the table of some tensors; ``rows`` ascend, so that file order stays."""
        if len(rows) == len(self):
            return self
        return Table(
            files=self.files,
            names=[self.names[row] for row in rows.tolist()],
            file=self.file[rows],
            offset=self.offset[rows],
            nbytes=self.nbytes[rows],
            dtype=self.dtype[rows],
            ndim=self.ndim[rows],
            shape_offset=self.shape_offset[rows],
            shapes=self.shapes,
        )

    def info(self, row: int) -> TensorInfo:
        """Return one tensor as a value."""
        first = int(self.shape_offset[row])
        return TensorInfo(
            name=self.names[row],
            dtype=DTYPES[self.dtype[row]],
            shape=tuple(self.shapes[first : first + int(self.ndim[row])].tolist()),
            nbytes=int(self.nbytes[row]),
            file=self.files[self.file[row]],
            offset=int(self.offset[row]),
        )

    def places(self, first: int, last: int, offsets: npt.NDArray[np.uint64]) -> Places:
        """Return the tensors ``first`` to ``last - 1`` as places at ``offsets`` of a block."""
        chosen = slice(first, last)
        return Places(offsets, self.dtype[chosen], self.ndim[chosen], self.shape_offset[chosen], self.shapes)

    def dtype_names(self) -> set[str]:
        """Return the stored types that occur."""
        return {DTYPES[code] for code in distinct(self.dtype)}


def distinct(codes: npt.NDArray[Any]) -> list[int]:
    """Return the small whole numbers that occur, ascending.

    ``numpy.unique`` would import all of ``numpy.ma`` in the middle of a load.
    """
    return np.flatnonzero(np.bincount(codes)).tolist()


def build(headers: Sequence[Header], skipped: Sequence[set[str]]) -> Table:
    """Return the table of all headers without the skipped names of each file."""

    def joined(columns: list[Any], dtype: type[Any]) -> npt.NDArray[Any]:
        return np.concatenate(columns).astype(dtype, copy=False) if columns else np.zeros(0, dtype)

    shape_base = np.cumsum([0, *(len(header.shapes) for header in headers)], dtype=np.uint64)
    table = Table(
        files=tuple(header.path for header in headers),
        names=[name for header in headers for name in header.names],
        file=joined([np.full(len(header), number, np.uint32) for number, header in enumerate(headers)], np.uint32),
        offset=joined([header.begin + np.uint64(header.data_start) for header in headers], np.uint64),
        nbytes=joined([header.end - header.begin for header in headers], np.uint64),
        dtype=joined([header.dtype for header in headers], np.uint8),
        ndim=joined([header.ndim for header in headers], np.uint8),
        shape_offset=joined([header.shape_offset + shape_base[i] for i, header in enumerate(headers)], np.uint64),
        shapes=joined([header.shapes for header in headers], np.uint64),
    )
    if not any(skipped):
        return table
    return table.take(
        np.array(
            [row for row, name in enumerate(table.names) if name not in skipped[int(table.file[row])]], dtype=np.intp
        )
    )


def choose(table: Table, names: Names, row_of: Callable[[], dict[str, int]]) -> Table:
    """Return the table of the wanted tensors; ``row_of`` gives the dict of names to rows.

    Raises TensorNotFoundError: a name that is not there.
    """
    if names is None:
        return table
    if callable(names):
        rows = [row for row, name in enumerate(table.names) if names(name)]
    else:
        if isinstance(names, str):
            names = (names,)
        known = row_of()
        rows = sorted({find_row(known, name) for name in names})
    return table.take(np.array(rows, dtype=np.intp))


def find_row(row_of: dict[str, int], name: str) -> int:
    """Return the row of ``name``; raises TensorNotFoundError with the names that look like it."""
    row = row_of.get(name)
    if row is None:
        close = difflib.get_close_matches(name, list(row_of)[:20000], 3)
        raise TensorNotFoundError(
            f"no tensor {name!r} among the {len(row_of)} of the checkpoint"
            + (f"; close to it: {', '.join(map(repr, close))}" if close else "")
        )
    return row
