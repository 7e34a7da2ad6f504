"""``xds load``: a checkpoint into memory, and how its bytes got there. Layer: top."""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from xds.cli.targets import complete, human, print_json, progress, to_url


def parse_requirements(words: list[str]) -> dict[str, str]:
    """Return ``{"posting": "host"}`` of ``["posting=host"]``; raises typer.BadParameter."""
    wanted: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not (key and equals and value):
            raise typer.BadParameter(f"{word!r} is not KEY=VALUE, as in posting=host", param_hint="--require")
        wanted[key.strip()] = value.strip()
    return wanted


def _shares(by: Mapping[str, int]) -> str:
    """Return ``copy``, or ``copy 90 %, mapped 10 %`` where there are several."""
    total = sum(by.values())
    if len(by) < 2 or not total:
        return ", ".join(by) or "-"
    return ", ".join(f"{name} {100 * nbytes / total:.0f} %" for name, nbytes in by.items())


def summary(url: str, result: Any, seconds: float) -> dict[str, Any]:
    """Return what ``xds load`` prints, as plain values.

    ``seconds`` is the wall time of the call, start-up of the GPU included; ``transfer_seconds`` the read's own.
    """
    report = result.report
    transfer_seconds = report.seconds.get("total", seconds)
    return {
        "url": url,
        "tensors": len(result),
        "nbytes": report.nbytes,
        "seconds": seconds,
        "transfer_seconds": transfer_seconds,
        "gb_per_s": report.nbytes / transfer_seconds / 1e9 if transfer_seconds else None,
        "posting": dict(report.posting),
        "placement": dict(report.placement),
        "method": dict(report.method),
        "resident": report.resident,
        "device": "cpu" if report.device is None else f"cuda:{report.device}",
        "report": report.as_dict(),
    }


def rows(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the lines of the table for people: name and text."""
    rate, resident = values["gb_per_s"], values["resident"]
    return [
        ("tensors", str(values["tensors"])),
        ("bytes", f"{values['nbytes']} ({human(values['nbytes'])})"),
        ("seconds", f"{values['transfer_seconds']:.4f} ({values['seconds']:.4f} with start-up)"),
        ("GB/s", "-" if rate is None else f"{rate:.2f}"),
        ("device", values["device"]),
        ("posting", _shares(values["posting"])),
        ("placement", _shares(values["placement"])),
        ("method", _shares(values["method"])),
        ("resident", "not sampled" if resident is None else f"{100 * resident:.0f} % of the sampled pages"),
        *[("note", note) for note in values["report"]["notes"]],
    ]


def load(
    url: Annotated[
        str,
        typer.Argument(metavar="URL", help="A safetensors file, an index.json or a folder.", autocompletion=complete),
    ],
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1. Without it: the GPU if there is one.", show_default=False)
    ] = None,
    framework: Annotated[
        str | None, typer.Option(help="numpy, cupy, torch or jax: whose arrays.", show_default=False)
    ] = None,
    require: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Fail unless so: posting=host, placement=copy.", show_default=False),
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Load only tensors with such names (layers.0.*).", show_default=False),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds without any progress before giving up.")] = 60.0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Load a checkpoint into memory and tell how fast and by which way."""
    import xds

    requirements = parse_requirements(require or [])
    patterns = name or []

    def wanted(tensor: str) -> bool:
        return any(fnmatch.fnmatchcase(tensor, pattern) for pattern in patterns)

    address = to_url(url)
    with progress("loading", enabled=not json) as update:
        begin = time.perf_counter()
        result = xds.load(
            address,
            device=device,
            framework=framework,
            require=requirements or None,
            names=wanted if patterns else None,
            progress=update,
            timeout_s=timeout,
        )
        seconds = time.perf_counter() - begin
    values = summary(address, result, seconds)
    if json:
        print_json(values)
        return
    for key, text in rows(values):
        typer.echo(f"{key:<10} {text}")
