"""Errors as the commands tell them: one line for people, a value for JSON. Layer: top."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator
from typing import Any

import typer

STDOUT = "standard output"


class OutputError(OSError):
    """Standard output cannot be written to."""


def describe(error: BaseException) -> str:
    """Return one line that says what went wrong."""
    if isinstance(error, OSError) and error.strerror and type(error).__str__ is OSError.__str__:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    text = str(error).strip()
    if not text:
        return type(error).__name__
    if isinstance(error, OSError | ValueError | ImportError | NotImplementedError):
        return text
    return f"{type(error).__name__}: {text}"


def as_value(error: BaseException) -> dict[str, Any]:
    """Return ``{"error": {"type", "errno", "message", "filename"}}``."""
    return {
        "error": {
            "type": type(error).__name__,
            "errno": getattr(error, "errno", None),
            "message": describe(error),
            "filename": getattr(error, "filename", None),
        }
    }


def complain(error: BaseException, *, debug: bool) -> None:
    """Tell of an error on standard error: one line, or the traceback."""
    if debug:
        traceback.print_exception(error)
    else:
        typer.echo(f"xds: error: {describe(error)}", err=True)


@contextlib.contextmanager
def output() -> Iterator[None]:
    """Around writes to standard output: raise what fails there as :class:`OutputError`; a closed pipe as it is."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(error.errno, error.strerror, STDOUT) from error


def echo(text: str = "") -> None:
    """Print a line to standard output."""
    with output():
        typer.echo(text)


def silence_stdout() -> None:
    """Point standard output at nothing, so that the flush at exit does not complain once more."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


class Attempts:
    """A command over several targets: what fails is told at once, and the others go on.

    Attributes:
        values: what to print as JSON: a value or an error a target.
    """

    def __init__(self, context: typer.Context) -> None:
        self._debug = bool((context.obj or {}).get("debug"))
        self._failed = False
        self.values: list[Any] = []

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Around the work for one target."""
        try:
            yield
        except (OutputError, BrokenPipeError):
            raise
        except Exception as error:
            complain(error, debug=self._debug)
            self.values.append(as_value(error))
            self._failed = True

    def finish(self) -> None:
        """Exit with 1 if a target failed."""
        if self._failed:
            raise typer.Exit(1)
