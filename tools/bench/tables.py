"""Medians, ratios, goals and the Markdown tables of a run. Layer: tools; pure, stdlib alone."""

from __future__ import annotations

import statistics
from typing import Any

from bench.loaders import is_ours, is_raw

TITLES = {
    "tmpfs": "tmpfs, 4 shards",
    "warm": "disk file system, page cache warm, 4 shards",
    "cold": "disk file system, page cache cold",
    "many": "tmpfs, 18,867 equal tensors in one file",
    "odd": "tmpfs, 18,867 tensors of odd sizes in one file",
    "one": "tmpfs, one tensor in one file",
    "first": "tmpfs, 4 shards, first load of a process",
}


def summarize(outcome: dict[str, Any]) -> None:
    """Add median, minimum, maximum and rates (bytes/s) to what a worker gave back, in place.

    The first load is the warm-up and stands apart, unless it is the only one.
    """
    loads = outcome.get("loads")
    if not loads:
        return
    seconds = [load["seconds"] for load in loads]
    timed = seconds[1:] or seconds
    nbytes = outcome["nbytes"]
    outcome.update(
        first_s=seconds[0],
        samples=len(timed),
        median_s=statistics.median(timed),
        min_s=min(timed),
        max_s=max(timed),
        first_bytes_per_s=nbytes / seconds[0],
        median_bytes_per_s=nbytes / statistics.median(timed),
        best_bytes_per_s=nbytes / min(timed),
        worst_bytes_per_s=nbytes / max(timed),
        cpu_s_per_gib=statistics.median(load["cpu_s"] for load in loads) / (nbytes / 2**30),
    )


def merge_first(outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    """Make one outcome of several fresh processes: each gives one first load."""
    bad = next((outcome for outcome in outcomes if outcome["status"] != "ok"), None)
    if bad is not None:
        return bad
    return {**outcomes[-1], "loads": [outcome["loads"][0] for outcome in outcomes], "fresh_processes": len(outcomes)}


def summarize_first(outcome: dict[str, Any]) -> None:
    """Like :func:`summarize` where every load is the first of its own process, so none is a warm-up."""
    if outcome.get("loads"):
        outcome["loads"] = [outcome["loads"][0], *outcome["loads"]]
        summarize(outcome)
        outcome["loads"] = outcome["loads"][1:]


def _good(case: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: peer for name, peer in case["peers"].items() if peer["status"] == "ok"}


def add_ratios(case: dict[str, Any]) -> None:
    """Add to each peer its ratio to the case's limit, to the best loader not ours, and to plain ``readinto``."""
    good = _good(case)
    limit = (case.get("limit") or {}).get("bytes_per_s")
    others = {name: peer["median_bytes_per_s"] for name, peer in good.items() if not is_ours(name)}
    # A loader that maps the file and copies nothing is no peer in a host load.
    if case["device"] == "cpu":
        others.pop("safetensors", None)
    best = max(others, key=lambda name: others[name], default=None)
    case["best_peer"] = best
    references = {"readinto": good.get("readinto"), "safetensors": good.get("safetensors")}
    for peer in good.values():
        rate = peer["median_bytes_per_s"]
        peer["ratio_to_limit"] = rate / limit if limit else None
        peer["ratio_to_best_peer"] = rate / others[best] if best else None
        for name, reference in references.items():
            peer[f"ratio_to_{name}"] = rate / reference["median_bytes_per_s"] if reference else None


def many_to_one(cases: dict[str, dict[str, Any]], many: str) -> dict[str, float]:
    """Return, by peer, seconds a byte with many tensors over seconds a byte with one."""
    if many not in cases or "one" not in cases:
        return {}
    single = _good(cases["one"])
    return {
        name: single[name]["median_bytes_per_s"] / peer["median_bytes_per_s"]
        for name, peer in _good(cases[many]).items()
        if name in single and not is_raw(name)
    }


def goals(run: dict[str, Any]) -> list[dict[str, Any]]:
    """Return each goal with what the better of our loaders reached; ``value`` is ``None`` where not measured."""
    cases: dict[str, dict[str, Any]] = run["cases"]

    def ours(case: str, key: str) -> float | None:
        values = [peer.get(key) for name, peer in _good(cases[case]).items() if is_ours(name)] if case in cases else []
        return max((value for value in values if value is not None), default=None)

    rows: list[tuple[str, float, float, bool, float | None]] = [
        ("tmpfs, of the pinned copy limit", 0.85, 0.92, True, ours("tmpfs", "ratio_to_limit")),
        ("warm page cache, of the pinned copy limit", 0.88, 0.92, True, ours("warm", "ratio_to_limit")),
        ("cold, of the best raw read", 0.97, 0.99, True, ours("cold", "ratio_to_limit")),
    ]
    first = ours("first", "median_bytes_per_s")
    rows.append(("first load of a process, GB/s", 38, 44, True, None if first is None else first / 1e9))
    for many, label in (("many", "18,867 tensors"), ("odd", "18,867 tensors of odd sizes")):
        ratio = min((r for name, r in many_to_one(cases, many).items() if is_ours(name)), default=None)
        rows.append((f"{label}, time over one tensor's", 1.15, 1.05, False, ratio))
    pinned = [
        peer["pinned_peak_nbytes"]
        for case in cases.values()
        for name, peer in _good(case).items()
        if is_ours(name) and peer.get("pinned_peak_nbytes") is not None
    ]
    rows.append(("pinned memory at its peak, MiB", 64, 64, False, max(pinned) / 2**20 if pinned else None))
    return [
        {
            "goal": label,
            "must": must,
            "stretch": stretch,
            "value": value,
            "met": None if value is None else (value >= must if larger else value <= must),
        }
        for label, must, stretch, larger, value in rows
    ]


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e9:.2f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def case_table(name: str, case: dict[str, Any]) -> str:
    """Return one case as a Markdown table."""
    limit = case.get("limit") or {}
    head = f"### {TITLES[name]} ({case['nbytes'] / 2**30:.2f} GiB)"
    if limit.get("bytes_per_s"):
        head += f"; limit {limit['bytes_per_s'] / 1e9:.2f} GB/s ({limit['what']})"
    lines = [
        head,
        "",
        "| loader | first | median | min-max | of limit | of best peer | CPU s/GiB | bytes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    ordered = sorted(case["peers"].items(), key=lambda item: -item[1].get("median_bytes_per_s", 0))
    for peer_name, peer in ordered:
        label = peer_name + (f" {peer['version']}" if peer.get("version") else "")
        if peer["status"] != "ok":
            lines.append(f"| {label} | {peer['status']}: {_one_line(peer.get('reason'))} | | | | | | |")
            continue
        lines.append(
            f"| {label} | {_rate(peer['first_bytes_per_s'])} | {_rate(peer['median_bytes_per_s'])} "
            f"| {_rate(peer['worst_bytes_per_s'])}-{_rate(peer['best_bytes_per_s'])} (n={peer['samples']}) "
            f"| {_ratio(peer.get('ratio_to_limit'))} | {_ratio(peer.get('ratio_to_best_peer'))} "
            f"| {peer['cpu_s_per_gib']:.3f} | exact |"
        )
    return "\n".join(lines)


def _one_line(text: object) -> str:
    return " ".join(str(text).split()).replace("|", "/")[:160]


def render(run: dict[str, Any]) -> str:
    """Return all tables of a run."""
    parts = [case_table(name, case) for name, case in run["cases"].items()]
    for many in ("many", "odd"):
        ratios = many_to_one(run["cases"], many)
        if ratios:
            text = ", ".join(f"{name} {ratio:.3f}" for name, ratio in sorted(ratios.items(), key=lambda item: item[1]))
            parts.append(f"Time a byte, {TITLES[many]}, over one tensor: {text}")
    if run["device"] == "cuda":
        lines = ["### Goals", "", "| goal | must | stretch | measured | met |", "|---|---|---|---|---|"]
        for row in goals(run):
            value = "not measured" if row["value"] is None else f"{row['value']:.3f}"
            met = {None: "-", True: "yes", False: "no"}[row["met"]]
            lines.append(f"| {row['goal']} | {row['must']} | {row['stretch']} | {value} | {met} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)
