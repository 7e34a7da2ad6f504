"""The benchmark tools: files whose bytes are known, exact checks, honest failures, ratios; tiny sizes, host only."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

TOOLS = Path(__file__).resolve().parents[1] / "tools"
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


@pytest.fixture(scope="module")
def bench():
    """The package of the tools, which is not installed."""
    sys.path.insert(0, str(TOOLS))
    try:
        import bench.check
        import bench.data
        import bench.limits
        import bench.loaders
        import bench.residency
        import bench.tables
        import bench.worker

        yield bench
    finally:
        sys.path.remove(str(TOOLS))


def run_tool(name, *arguments, timeout=110):
    command = [sys.executable, str(TOOLS / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


# The whole run


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    (folder / "memory").mkdir()
    done = run_tool(
        "bench_load.py", "--device", "cpu", "--scale", 0.001, "--repeats", 2, "--first-repeats", 2,
        "--peers", "xds-numpy,xds,safetensors-owned,readinto,instanttensor",
        "--tmpfs-dir", folder / "memory", "--disk-dir", folder, "--json", folder / "out.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "out.json").read_text()), done.stdout, folder


def _skip_without_residency(run):
    reason = run["cases"]["warm"]["peers"]["readinto"].get("reason")
    if reason is not None and "RWF_NOWAIT" in reason:
        pytest.skip(reason)


@needs_torch
def test_every_case_has_every_loader_with_checked_bytes_and_ratios(whole_run):
    run, _, _ = whole_run
    assert set(run["cases"]) == {"tmpfs", "first", "many", "odd", "one", "warm", "cold"}
    for name, case in run["cases"].items():
        if "RWF_NOWAIT" in str(case["peers"]["readinto"]["reason"]):
            continue
        assert set(case["peers"]) == {"xds-numpy", "xds", "safetensors-owned", "readinto", "instanttensor"}
        assert case["limit"]["bytes_per_s"] > 0, name
        for peer in ("xds-numpy", "xds", "safetensors-owned", "readinto"):
            outcome = case["peers"][peer]
            assert outcome["status"] == "ok", (name, peer, outcome)
            assert outcome["check"]["problem"] is None
            assert 0.9 * case["nbytes"] < outcome["check"]["nbytes"] <= case["nbytes"]
            assert outcome["min_s"] <= outcome["median_s"] <= outcome["max_s"]
            assert outcome["samples"] == 2
            assert outcome["ratio_to_limit"] == pytest.approx(
                outcome["median_bytes_per_s"] / case["limit"]["bytes_per_s"]
            )
            best = case["peers"][case["best_peer"]]["median_bytes_per_s"]
            assert outcome["ratio_to_best_peer"] == pytest.approx(outcome["median_bytes_per_s"] / best)
            plain = case["peers"]["readinto"]["median_bytes_per_s"]
            assert outcome["ratio_to_readinto"] == pytest.approx(outcome["median_bytes_per_s"] / plain)


@needs_torch
def test_a_loader_that_cannot_run_is_named_with_its_reason(whole_run):
    run, text, _ = whole_run
    outcome = run["cases"]["tmpfs"]["peers"]["instanttensor"]
    assert (outcome["status"], outcome["reason"]) == ("unavailable", "does not load to cpu")
    assert "unavailable: does not load to cpu" in text


@needs_torch
def test_cold_files_are_proven_cold_before_each_load_and_warm_ones_warm(whole_run):
    run, _, _ = whole_run
    _skip_without_residency(run)
    for peer in ("xds-numpy", "readinto"):
        assert [load["resident_before"] for load in run["cases"]["warm"]["peers"][peer]["loads"]] == [1.0] * 3
        assert [load["resident_before"] for load in run["cases"]["cold"]["peers"][peer]["loads"]] == [0.0] * 3


@needs_torch
def test_our_own_report_is_kept_and_says_what_moved(whole_run):
    run, _, _ = whole_run
    outcome = run["cases"]["tmpfs"]["peers"]["xds-numpy"]
    report = outcome["loads"][-1]["report"]
    assert report["nbytes"] == outcome["check"]["nbytes"]
    assert sum(report["placement"].values()) == report["nbytes"]


@needs_torch
def test_the_run_describes_the_machine_and_leaves_no_files(whole_run):
    run, text, folder = whole_run
    assert run["machine"]["cpus"] == os.cpu_count()
    assert run["machine"]["kernel"]
    assert run["machine"]["packages"]["numpy"] == np.__version__
    assert "| loader | first | median |" in text
    assert [path.name for path in folder.iterdir() if path.name.startswith("xds-bench")] == []
    assert list((folder / "memory").iterdir()) == []


def test_what_no_longer_fits_the_budget_is_named(tmp_path):
    done = run_tool(
        "bench_load.py", "--device", "cpu", "--scale", 0.0001, "--budget-s", 0, "--cases", "one,cold",
        "--tmpfs-dir", tmp_path, "--disk-dir", tmp_path, "--json", tmp_path / "out.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = json.loads((tmp_path / "out.json").read_text())
    for case in ("one", "cold"):
        reasons = {peer["reason"] for peer in run["cases"][case]["peers"].values()}
        assert reasons == {"the time budget of the run is spent"}


def test_a_file_system_that_is_too_small_is_named(tmp_path):
    done = run_tool(
        "bench_load.py", "--device", "cpu", "--tmpfs-gib", 1e6, "--cases", "one", "--peers", "readinto",
        "--tmpfs-dir", tmp_path, "--json", tmp_path / "out.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    peer = json.loads((tmp_path / "out.json").read_text())["cases"]["one"]["peers"]["readinto"]
    assert peer["status"] == "not run"
    assert "are needed" in peer["reason"]


@pytest.mark.parametrize("arguments", [["--cases", "nope"], ["--peers", "nope"], ["--scale", "0"]])
def test_a_wrong_argument_is_refused(arguments):
    done = run_tool("bench_load.py", *arguments)
    assert done.returncode == 2
    assert "error:" in done.stderr


@needs_torch
def test_the_sweep_prints_a_sorted_table_and_skips_rings_that_are_too_large(tmp_path):
    done = run_tool(
        "sweep_mover.py", "--device", "cpu", "--dir", tmp_path, "--gib", 0.01, "--threads", "2,16", "--slots", 2,
        "--chunk-kib", "256,4096", "--repeats", 1, "--json", tmp_path / "out.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    tried = {
        (row["environment"].get("XDS_MOVER_THREADS"), row["environment"].get("XDS_MOVER_CHUNK_NBYTES")) for row in rows
    }
    assert tried == {(None, None), ("2", "262144"), ("2", "4194304"), ("16", "262144")}
    assert all(row["status"] == "ok" for row in rows), rows
    rates = [float(line.split("|")[6]) for line in done.stdout.splitlines()[2:]]
    assert rates == sorted(rates, reverse=True)


@needs_torch
def test_limits_are_measured_or_say_why_not(tmp_path):
    done = run_tool("limits.py", "--device", "cpu", "--dir", tmp_path, "--gib", 0.01, "--json", tmp_path / "out.json")
    found = json.loads((tmp_path / "out.json").read_text())
    if "error" in found:
        assert done.returncode == 1
        assert "compile" in found["error"]
    else:
        assert done.returncode == 0, done.stderr
        assert all(row["bytes_per_s"] > 0 for row in found["memcpy"])
        assert any("bytes_per_s" in row for row in found["warm_reads"])
        assert "limits: warm reads" in done.stderr


@needs_torch
def test_limits_clean_up_when_they_are_ended(tmp_path):
    command = [sys.executable, str(TOOLS / "limits.py"), "--device", "cpu", "--dir", str(tmp_path), "--gib", "0.01"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stderr.readline()
        if not line.startswith("limits: "):
            pytest.skip(f"limits are not measured here: {line}")
        assert list(tmp_path.iterdir())
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


# Data and checks


@pytest.mark.parametrize(("layout", "shards"), [("one", 1), ("many", 1), ("odd", 2), ("shards", 3)])
def test_made_files_are_valid_safetensors(bench, tmp_path, layout, shards):
    paths = bench.data.make_checkpoint(tmp_path, layout, nbytes=1 << 20, shards=shards, scale=0.001)
    assert len(paths) == shards
    for path in paths:
        entries, start = bench.data.read_entries(path)
        assert entries[0].start == 0
        ends = [entry.start + entry.nbytes for entry in entries]
        assert [entry.start for entry in entries[1:]] == ends[:-1]
        assert path.stat().st_size == start + ends[-1]
        assert start % 8 == 0
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(
        entry.nbytes for path in paths for entry in bench.data.read_entries(path)[0]
    )


def test_odd_layout_has_no_aligned_size(bench, tmp_path):
    paths = bench.data.make_checkpoint(tmp_path, "odd", nbytes=1 << 20, tensors=50)
    assert all(entry.nbytes % 4 == 2 for entry in bench.data.read_entries(paths[0])[0])


def test_shards_and_blocks_hold_different_bytes(bench):
    words = bench.data.expected_words(0, 1 << 16, 0)
    assert len(np.unique(words)) == len(words)
    assert not np.array_equal(words, bench.data.expected_words(0, 1 << 16, 1))
    np.testing.assert_array_equal(words[1000:], bench.data.expected_words(1000, (1 << 16) - 1000, 0))


def _arrays(bench, paths):
    arrays = {}
    for path in paths:
        entries, start = bench.data.read_entries(path)
        data = bytearray(path.read_bytes())[start:]
        for entry in entries:
            piece = np.frombuffer(data, np.uint16, count=entry.nbytes // 2, offset=entry.start)
            arrays[entry.name] = piece.reshape(entry.shape).copy()
    return arrays


@needs_torch
@pytest.mark.parametrize("layout", ["shards", "odd"])
def test_right_arrays_pass_the_check(bench, tmp_path, layout):
    paths = bench.data.make_checkpoint(tmp_path, layout, nbytes=1 << 20, shards=2, scale=0.001)
    result = bench.check.check_tensors(_arrays(bench, paths), paths)
    assert result.problem is None
    assert result.nbytes == sum(entry.nbytes for path in paths for entry in bench.data.read_entries(path)[0])


@needs_torch
def test_one_wrong_byte_anywhere_fails_the_check(bench, tmp_path):
    paths = bench.data.make_checkpoint(tmp_path, "odd", nbytes=1 << 18, shards=2, tensors=5)
    arrays = _arrays(bench, paths)
    for name in arrays:
        for index in (0, -1):
            arrays[name].reshape(-1)[index] ^= 1
            assert "1 bytes are wrong" in bench.check.check_tensors(arrays, paths).problem
            arrays[name].reshape(-1)[index] ^= 1
    assert bench.check.check_tensors(arrays, paths).problem is None


@needs_torch
def test_missing_extra_and_reshaped_tensors_fail_the_check(bench, tmp_path):
    paths = bench.data.make_checkpoint(tmp_path, "many", nbytes=1 << 18, tensors=4)
    arrays = _arrays(bench, paths)
    name = next(iter(arrays))
    assert "shape" in bench.check.check_tensors({**arrays, name: arrays[name].reshape(-1)}, paths).problem
    assert "5 tensors came, 4" in bench.check.check_tensors({**arrays, "more": arrays[name]}, paths).problem
    del arrays[name]
    assert "is missing" in bench.check.check_tensors(arrays, paths).problem


@needs_torch
def test_tensors_given_as_raw_bytes_pass_and_are_counted(bench, tmp_path):
    paths = bench.data.make_checkpoint(tmp_path, "odd", nbytes=1 << 18, tensors=4)
    arrays = {name: array.reshape(-1).view(np.uint8) for name, array in _arrays(bench, paths).items()}
    result = bench.check.check_tensors(arrays, paths)
    assert (result.problem, result.raw) == (None, 4)


@needs_torch
def test_swapped_equal_sized_tensors_fail_the_check(bench, tmp_path):
    paths = bench.data.make_checkpoint(tmp_path, "many", nbytes=1 << 18, tensors=4)
    arrays = _arrays(bench, paths)
    first, second, *_ = arrays
    arrays[first], arrays[second] = arrays[second], arrays[first]
    assert "bytes are wrong" in bench.check.check_tensors(arrays, paths).problem


@needs_torch
def test_raw_bytes_are_checked_too(bench, tmp_path):
    paths = bench.data.make_checkpoint(tmp_path, "odd", nbytes=1 << 18, tensors=5)
    raw = np.frombuffer(bytearray(paths[0].read_bytes()), np.uint8)
    assert bench.check.check_raw({str(paths[0]): raw}, paths).problem is None
    raw[-1] ^= 1
    assert "1 bytes are wrong" in bench.check.check_raw({str(paths[0]): raw}, paths).problem
    assert "are in the file" in bench.check.check_raw({str(paths[0]): raw[:-1]}, paths).problem


# Processes


def test_a_task_that_raises_is_a_failure_with_its_text(bench):
    status, reason, log = bench.worker.run_isolated(int, "seven", timeout_s=60)
    assert status == "failed"
    assert "seven" in reason
    assert "Traceback" in log


def test_a_process_that_dies_is_a_failure_with_its_code(bench):
    assert bench.worker.run_isolated(os._exit, 3, timeout_s=60)[:2] == (
        "failed",
        "the process ended with code 3 and no answer",
    )


def test_a_process_that_hangs_is_ended(bench):
    begin = time.monotonic()
    status, reason, _ = bench.worker.run_isolated(time.sleep, 600, timeout_s=2)
    assert (status, reason) == ("failed", "no answer within 2 s")
    assert time.monotonic() - begin < 60


def test_a_process_has_its_environment_and_leaves_ours(bench):
    status, value, _ = bench.worker.run_isolated(
        os.getenv, "XDS_BENCH_TEST", timeout_s=60, environment={"XDS_BENCH_TEST": "yes"}
    )
    assert (status, value) == ("ok", "yes")
    assert "XDS_BENCH_TEST" not in os.environ


@needs_torch
def test_a_loader_that_gives_wrong_bytes_is_found_out(bench, tmp_path):
    paths = bench.data.make_checkpoint(tmp_path, "one", nbytes=1 << 18)
    with paths[0].open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    where = {"device": "cpu", "paths": [str(paths[0])], "cache": "memory"}
    spec = {"peer": "readinto", **where, "repeats": 1, "allowance_s": 10}
    outcome = bench.worker.run_peer(spec)
    assert outcome["status"] == "wrong bytes"
    assert "1 bytes are wrong" in outcome["reason"]


# Tables


def _peer(rate, nbytes=10**9, status="ok", **more):
    peer = {"status": status, "nbytes": nbytes, "version": "1", "reason": "why", **more}
    if status == "ok":
        peer["loads"] = [{"seconds": nbytes / rate / 1e9 * factor, "cpu_s": 1.0} for factor in (4, 2, 1, 0.5)]
    return peer


def test_the_first_load_stands_apart_from_the_median(bench):
    peer = _peer(10)
    bench.tables.summarize(peer)
    assert peer["first_s"] == pytest.approx(0.4)
    assert (peer["min_s"], peer["median_s"], peer["max_s"]) == pytest.approx((0.05, 0.1, 0.2))
    assert peer["median_bytes_per_s"] == pytest.approx(10e9)


def test_first_loads_of_fresh_processes_all_count(bench):
    outcomes = [{**_peer(rate), "loads": [{"seconds": 1 / rate, "cpu_s": 1.0}]} for rate in (10, 20, 30)]
    merged = bench.tables.merge_first(outcomes)
    bench.tables.summarize_first(merged)
    assert merged["samples"] == merged["fresh_processes"] == len(merged["loads"]) == 3
    assert merged["median_s"] == pytest.approx(1 / 20)


def test_one_failed_process_fails_the_first_load(bench):
    merged = bench.tables.merge_first([_peer(10), {"status": "failed", "reason": "no memory"}])
    assert merged["reason"] == "no memory"


def test_goals_are_met_missed_or_not_measured(bench):
    def case(**peers):
        found = {"device": "cuda", "nbytes": 10**9, "limit": {"what": "copy", "bytes_per_s": 50e9}, "peers": peers}
        for peer in peers.values():
            bench.tables.summarize(peer)
        bench.tables.add_ratios(found)
        return found

    run = {
        "device": "cuda",
        "cases": {
            "tmpfs": case(xds=_peer(45, pinned_peak_nbytes=32 << 20), instanttensor=_peer(40)),
            "warm": case(xds=_peer(30), safetensors=_peer(7), runai=_peer(0, status="failed")),
            "many": case(xds=_peer(40)),
            "one": case(xds=_peer(44)),
        },
    }
    found = {row["goal"]: row for row in bench.tables.goals(run)}
    assert found["tmpfs, of the pinned copy limit"]["value"] == pytest.approx(0.9)
    assert found["tmpfs, of the pinned copy limit"]["met"] is True
    assert found["warm page cache, of the pinned copy limit"]["met"] is False
    assert found["cold, of the best raw read"]["met"] is None
    assert found["18,867 tensors, time over one tensor's"]["value"] == pytest.approx(1.1)
    assert found["pinned memory at its peak, MiB"]["value"] == 32
    assert run["cases"]["tmpfs"]["peers"]["xds"]["ratio_to_best_peer"] == pytest.approx(45 / 40)
    text = bench.tables.render(run)
    assert "failed: why" in text
    assert "not measured" in text


def test_the_best_way_to_read_is_taken_by_its_median(bench):
    def row(rate, mode="uring-direct", **more):
        return {"mode": mode, "chunk_nbytes": 1, "width": 1, "willneed": False, "bytes_per_s": rate, **more}

    rows = [row(9), row(1), row(2), row(5, "threads-buffered"), {**row(0, "threads-direct"), "error": "refused"}]
    del rows[-1]["bytes_per_s"]
    best = bench.limits.best_read(rows)
    assert (best["mode"], best["bytes_per_s"], best["samples"]) == ("uring-direct", 2, 3)
    assert bench.limits.best_read(rows[-1:]) is None


def test_dropped_files_are_cold_and_filled_ones_warm(bench, tmp_path):
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.write(os.urandom(1 << 20))
        file.flush()
        os.fsync(file.fileno())
    try:
        assert bench.residency.make_warm([path]) == 1.0
    except OSError as error:
        pytest.skip(f"this file system does not answer RWF_NOWAIT ({error}), so residency can't be proven")
    assert bench.residency.make_cold([path]) == 0.0
    assert bench.residency.make_warm([path]) == 1.0
