"""``xds load``: a checkpoint into memory, and how its bytes got there. Layer: top."""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from xds.cli.errors import echo
from xds.cli.targets import complete, human, print_json, progress, to_url

#: Loads of fewer bytes have no rate worth a line.
_RATE_NBYTES = 1_000_000


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


def parse_device(word: str | None) -> str | int | None:
    """Return the device that :func:`xds.load` takes; raises typer.BadParameter."""
    if word is None or word in ("cpu", "cuda"):
        return word
    number = word.removeprefix("cuda:")
    if number.isascii() and number.isdigit():
        return int(number)
    raise typer.BadParameter(f"{word!r} is none of cpu, cuda, cuda:1, 1", param_hint="--device")


def select(url: str, names: Sequence[str], patterns: Sequence[str]) -> list[str] | None:
    """Return the names that match one of the patterns; ``None`` (all) without patterns.

    Raises:
        TensorNotFoundError: a pattern that matches none, unless there are no names at all.
    """
    from xds.checkpoint import TensorNotFoundError

    chosen: dict[str, None] = {}
    for pattern in patterns:
        matching = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if names and not matching:
            raise TensorNotFoundError(
                f"{url}: no tensor matches {pattern!r} among {len(names)}; they begin with "
                + ", ".join(map(repr, names[:3]))
            )
        chosen.update(dict.fromkeys(matching))
    return list(chosen) if patterns else None


def summary(url: str, result: Any, seconds: float) -> dict[str, Any]:
    """Return what ``xds load`` prints, as plain values (keys: docs/cli.md).

    ``seconds`` is the wall time of the call, start-up of the GPU included.
    """
    report = result.report
    transfer_seconds = report.seconds.get("total", seconds)
    return {
        "url": url,
        "tensors": len(result),
        "nbytes": report.nbytes,
        "seconds": transfer_seconds,
        "seconds_with_startup": seconds,
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
    if values["nbytes"] < _RATE_NBYTES:
        rate = None  # start-up is all that would show
    return [
        ("tensors", str(values["tensors"])),
        ("bytes", f"{values['nbytes']} ({human(values['nbytes'])})"),
        ("seconds", f"{values['seconds']:.4f} ({values['seconds_with_startup']:.4f} with start-up)"),
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
        str | None,
        typer.Option(help="cpu, cuda, cuda:1 or 1. Without it: the GPU if there is one.", show_default=False),
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
    timeout: Annotated[float, typer.Option(help="Seconds without any progress before giving up; above 0.")] = 60.0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Load a checkpoint into memory and tell how fast and by which way."""
    import xds

    requirements = parse_requirements(require or [])
    ordinal = parse_device(device)
    address = to_url(url)
    with progress("loading", enabled=not json) as update:
        begin = time.perf_counter()
        try:
            with xds.open_checkpoint(address) as checkpoint:
                result = checkpoint.load(
                    select(address, checkpoint.names, name or []),
                    device=ordinal,
                    framework=framework,
                    require=requirements or None,
                    progress=update,
                    timeout_s=timeout,
                )
        except xds.errors.ArgumentError as error:
            raise typer.BadParameter(str(error)) from error
        seconds = time.perf_counter() - begin
    values = summary(address, result, seconds)
    if json:
        print_json(values)
        return
    for key, text in rows(values):
        echo(f"{key:<10} {text}")
