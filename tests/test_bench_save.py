"""tools/bench_save.py at a tiny size, on the CPU: all ways write, all bytes are right, the ratio is computed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parent.parent / "tools" / "bench_save.py"


def test_a_tiny_run(tmp_path):
    pytest.importorskip("torch", reason="no torch")
    pytest.importorskip("safetensors", reason="no safetensors")
    out = tmp_path / "save.json"
    options = ["--device", "cpu", "--gib", "0.01", "--repeats", "2", "--dir", tmp_path, "--json", out]
    command = [sys.executable, TOOL, *options]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [row["way"] for row in rows] == ["xds writefrom", "torch.save", "safetensors save_file", "cpu().tofile"]
    assert all(row["exact"] and row["gb_per_s"] > 0 and len(row["seconds"]) == 2 for row in rows)
    report = rows[0]["report"]
    assert report["operation"] == "write"
    assert sum(report["method"].values()) == report["nbytes"] == rows[0]["nbytes"]
    assert "| xds writefrom |" in done.stdout
