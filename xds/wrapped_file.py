"""Text and compression around a file, so that how a block ends reaches the file. Layer: file system.

:class:`io.TextIOWrapper` and the codecs close the file inside whatever has happened, or do not close it at all. A file
that is being written must know: it takes its name only if all went well.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any

from fsspec.compression import compr
from fsspec.core import get_compression


def _discard(file: Any) -> None:
    discard = getattr(file, "discard", None)
    if discard is not None:
        discard()


class TextFile(io.TextIOWrapper):
    """Text over a file; an exception within its ``with`` block discards what was written."""

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is not None:
            _discard(self.buffer)
        with contextlib.suppress(ValueError) if kind is not None else contextlib.nullcontext():
            self.close()

    def discard(self) -> None:
        """Close, and let go of what was written."""
        _discard(self.buffer)
        with contextlib.suppress(ValueError):
            self.close()


class CompressedFile:
    """A codec and the file beneath it, closed together."""

    def __init__(self, codec: Any, file: Any) -> None:
        self._codec, self._file = codec, file

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._codec, name)

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return bool(self._file.closed)

    def close(self) -> None:
        """Write what the codec holds back, and close both; a second call does nothing."""
        if self._file.closed:
            return
        try:
            self._codec.close()
        except BaseException:
            self.discard()
            raise
        self._file.close()

    def discard(self) -> None:
        """Close, and let go of what was written."""
        _discard(self._file)
        self._file.close()
        # The codec has nowhere to write its end to.
        with contextlib.suppress(Exception):
            self._codec.close()

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._codec)

    def __next__(self) -> bytes:
        line: bytes = next(self._codec)
        return line

    def __enter__(self) -> CompressedFile:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is not None:
            self.discard()
        else:
            self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()


def closing_both(file: Any, compression: str, path: str, mode: str) -> Any:
    """Return ``file`` behind the codec ``compression`` (a name of fsspec's, or ``infer``)."""
    try:
        name = get_compression(path, compression)
        return file if name is None else CompressedFile(compr[name](file, mode=mode[0]), file)
    except BaseException:
        _discard(file)
        file.close()
        raise
