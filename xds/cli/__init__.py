"""The command ``xds``: where a process begins. Layer: top; nothing of ours imports it.

Imports nothing but the interpreter's own small modules: an interrupt while the rest is imported is caught here.
"""

from __future__ import annotations

import sys

EXIT_INTERRUPTED = 130


def main() -> None:
    """Run the command line of this process and exit."""
    try:
        from xds.cli.root import run

        code = run()
    except KeyboardInterrupt:
        # Not typer: it may be what was being imported.
        print("xds: interrupted", file=sys.stderr)
        code = EXIT_INTERRUPTED
    sys.exit(code)
