"""``xds doctor``: what this machine can, what not, what to change. Layer: top."""

from __future__ import annotations

from typing import Annotated

import typer

from xds.cli.errors import echo
from xds.cli.targets import print_json

_SIGNS = {"ok": ("ok", "green"), "limited": ("limited", "yellow"), "absent": ("absent", "red")}


def doctor(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Tell what this machine can, what it cannot, and what to change.

    Exits with 1 if something is missing without which nothing works.
    """
    from xds.doctor import examine

    findings = examine()
    if json:
        print_json([finding.as_dict() for finding in findings])
    else:
        for finding in findings:
            text, colour = _SIGNS[finding.state]
            echo(typer.style(f"{text:<8}", fg=colour) + f"{finding.name}: {finding.what}")
            if finding.state != "ok":
                echo(f"{'':<8}  costs: {finding.cost}")
                echo(f"{'':<8}  do:    {finding.action}")
    if any(finding.required and finding.state == "absent" for finding in findings):
        raise typer.Exit(1)
