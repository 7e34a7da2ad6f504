"""A pytest plugin that writes what was skipped and why to the file in ``XDS_OUTCOMES``. Used by tools/checks.py."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

SKIPPED: list[dict[str, Any]] = []


def pytest_runtest_logreport(report: Any) -> None:
    """Note a skipped test: its reason and whether it needs a GPU."""
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = str(report.longrepr[2]).removeprefix("Skipped: ")
        SKIPPED.append({"test": report.nodeid, "gpu": "gpu" in report.keywords, "reason": reason})


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Write the file."""
    stats = terminalreporter.stats
    counts = {name: len(stats.get(name, ())) for name in ("passed", "failed", "error", "xfailed")}
    Path(os.environ["XDS_OUTCOMES"]).write_text(json.dumps({"counts": counts, "skipped": SKIPPED}), encoding="utf-8")
