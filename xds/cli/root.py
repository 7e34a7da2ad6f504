"""The root of the command ``xds``: commands, errors, exit codes. Layer: top; nothing of ours imports it.

Commands are entry points (group ``xds.commands``): a function is a command, a :class:`typer.Typer` a group of them.
Other distributions add theirs the same way. The modules here import the work they start only when they run.

Exit codes: 0 done, 1 error, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import errno
import importlib.metadata
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from xds.cli import EXIT_INTERRUPTED
from xds.cli.errors import STDOUT, OutputError, as_value, complain, output, silence_stdout
from xds.cli.targets import print_json

DISTRIBUTION = "xpu-direct-storage"
GROUP = "xds.commands"

EXIT_OK = 0
EXIT_ERROR = 1
EXIT_USAGE = 2


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"xds {importlib.metadata.version(DISTRIBUTION)}")
        raise typer.Exit(EXIT_OK)


def _root(
    ctx: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Storage reads that land straight in GPU memory.

    URL is an fsspec URL (xds:///folder/file) or a plain path.

    Exit codes: 0 done, 1 error, 2 wrong usage, 130 interrupted.
    """
    ctx.obj = {"debug": debug, "version": version}


def _unavailable(name: str, distribution: str, error: Exception) -> Callable[[], None]:
    """Return a command in place of one whose module cannot be imported, so that the others still work."""

    def command() -> None:
        raise ImportError(f"the command {name!r} of {distribution} cannot be imported: {error}") from error

    command.__doc__ = "(cannot be imported)"
    return command


def application() -> typer.Typer:
    """Return the application with the commands of every installed distribution, sorted by name."""
    app = typer.Typer(
        name="xds",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for entry in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda entry: entry.name):
        command: Any
        try:
            command = entry.load()
        except Exception as error:
            distribution = entry.dist.name if entry.dist else "an unknown distribution"
            command = _unavailable(entry.name, distribution, error)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=entry.name)
        else:
            app.command(entry.name)(command)
    return app


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; errors are one line on standard error."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given[: next((i for i, word in enumerate(given) if not word.startswith("-")), len(given))]
    if sys.stdout is None:  # closed by whoever started us
        complain(OutputError(errno.EBADF, os.strerror(errno.EBADF), STDOUT), debug=debug)
        return EXIT_ERROR
    try:
        result = typer.main.get_command(application()).main(given, prog_name="xds", standalone_mode=False)
        with output():
            sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        typer.echo("xds: interrupted", err=True)
        return EXIT_INTERRUPTED
    except (BrokenPipeError, SystemExit) as error:
        # typer makes a SystemExit of a closed pipe. That the reader (`| head`) has had enough is no error.
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
            raise
        silence_stdout()
        return EXIT_OK
    except Exception as error:
        show = getattr(error, "show", None)
        if callable(show) and isinstance(code := getattr(error, "exit_code", None), int):
            show()
            if "--debug" in given and not debug:
                typer.echo("--debug stands before the command: xds --debug COMMAND ...", err=True)
            return code
        complain(error, debug=debug)
        if isinstance(error, OutputError):
            silence_stdout()
        elif "--json" in given:
            print_json(as_value(error))
        return EXIT_ERROR
    code = result if isinstance(result, int) and not isinstance(result, bool) else EXIT_OK
    if code == EXIT_INTERRUPTED:
        typer.echo("xds: interrupted", err=True)
    return code
