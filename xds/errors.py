"""The exception tree of XDS. Layer: bottom; imports nothing of ours.

What fails is an :class:`XdsError`, which is an :class:`OSError` with ``errno`` set, so that generic code works.
What Python already has a class for (not found, no permission, is a folder, exists) is raised as that builtin class;
other wrong arguments are a plain ValueError or TypeError.
"""

from __future__ import annotations

import errno as _errno
from typing import ClassVar


class XdsError(OSError):
    """Base of all errors of XDS; ``errno`` is always set.

    A message says what failed, where (endpoint, file, offset, tensor), what was expected, and what to do.
    """

    default_errno: ClassVar[int] = _errno.EIO

    def __init__(self, message: str, *, errno: int | None = None, filename: str | None = None) -> None:
        super().__init__(self.default_errno if errno is None else errno, message)
        self.filename = filename
        self.message = message

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.errno, self.filename, self.__dict__.copy()))


def _rebuild(
    cls: type[XdsError], message: str, errno: int | None, filename: str | None, state: dict[str, object]
) -> XdsError:
    error = cls.__new__(cls)
    XdsError.__init__(error, message, errno=errno, filename=filename)
    error.__dict__.update(state)
    return error


class UrlError(XdsError, ValueError):
    """A URL that names nothing we can read."""

    default_errno = _errno.EINVAL


class ArgumentError(XdsError, ValueError):
    """A ``device``, ``framework``, ``require`` or ``timeout_s`` that is none, or that do not go together."""

    default_errno = _errno.EINVAL


class RangeError(XdsError, ValueError):
    """Offsets or lengths that do not fit the file or the array."""

    default_errno = _errno.EINVAL


class ArrayError(XdsError, TypeError):
    """An array that cannot be filled: read-only, not contiguous, wrong device, managed memory, wrong size."""

    default_errno = _errno.EINVAL


class CheckpointError(XdsError, ValueError):
    """A checkpoint that is not valid; raised before the first byte of data moves."""

    default_errno = _errno.EINVAL


class TruncatedError(CheckpointError):
    """A file that is shorter than its header says; the message names file, expected and actual bytes."""


class ShortReadError(XdsError):
    """The file ended before the bytes that were asked for (it shrank after it was opened)."""


class FileChangedError(XdsError):
    """Size, times or inode of a file moved between open and the end of the read."""

    default_errno = _errno.ESTALE


class ReadTimeoutError(XdsError, TimeoutError):
    """No byte arrived for the time allowed."""

    default_errno = _errno.ETIMEDOUT


class CancelledError(XdsError):
    """A read that was cancelled; what its arrays hold is undefined."""

    default_errno = _errno.ECANCELED


class DeviceError(XdsError):
    """The CUDA driver refused or failed."""


class DeviceMemoryError(DeviceError, MemoryError):
    """Not enough GPU memory; the message names what was needed and what is free."""

    default_errno = _errno.ENOMEM


class RequirementError(XdsError):
    """``require=`` asked for a posting or a placement that this read cannot have."""

    default_errno = _errno.EOPNOTSUPP


class ForkedProcessError(XdsError):
    """GPU work in a child of a process that used the GPU (start it with spawn or forkserver), or a parent's read."""

    default_errno = _errno.EOPNOTSUPP


class ReadOnlyError(XdsError):
    """A write to a file system that only reads."""

    default_errno = _errno.EROFS
