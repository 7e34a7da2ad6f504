"""Builds sdist and wheel into dist/, checks the wheel, installs it in clean environments and uses it there."""

from __future__ import annotations

import argparse
import io
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from elftools.elf.elffile import ELFFile
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).resolve().parent.parent
#: Parts of libc, which every Linux has.
ALLOWED_LIBRARIES = ("libc.so", "libm.so", "libdl.so", "libpthread.so", "librt.so", "ld-linux")


def run(*command: str | Path) -> None:
    code = subprocess.run([str(word) for word in command], check=False, cwd=ROOT).returncode
    if code:
        raise SystemExit(f"failed with {code}: {' '.join(str(word) for word in command)}")


def build(raw: Path) -> Path:
    """Return the wheel, built from the sdist so that the sdist is proven too."""
    shutil.rmtree(raw, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", raw, ROOT)
    (wheel,) = raw.glob("*.whl")
    return wheel


def repair(wheel: Path, raw: Path, destination: Path) -> Path:
    """Return the wheel under its manylinux tag, or as it is where auditwheel knows no tag for this libc."""
    done = subprocess.run(
        [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", raw / "repaired", wheel],
        capture_output=True,
        text=True,
        env={"PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"},
        check=False,
    )
    if done.returncode == 0:
        (wheel,) = (raw / "repaired").glob("*.whl")
    else:
        print(f"auditwheel gave no manylinux tag, the wheel keeps its own: {done.stderr.strip().splitlines()[-1]}")
    destination.mkdir(exist_ok=True)
    for old in destination.glob("xpu_direct_storage-*"):
        old.unlink()
    for path in [wheel, *raw.glob("*.tar.gz")]:
        shutil.copy2(path, destination)
    return destination / wheel.name


def verify(wheel: Path) -> None:
    """Raise SystemExit unless the wheel is what it must be."""
    faults: list[str] = []
    _, version, _, tags = parse_wheel_filename(wheel.name)
    for tag in tags:
        if (tag.interpreter, tag.abi) != ("py3", "none") or "linux" not in tag.platform:
            faults.append(f"tag {tag}: py3-none-linux is wanted")
        if not tag.platform.endswith(platform.machine()):
            faults.append(f"tag {tag}: {platform.machine()} is wanted")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        libraries = [name for name in names if ".so" in Path(name).name]
        if libraries != ["xds/native/libxds_native.so"]:
            faults.append(f"libraries {libraries}: xds/native/libxds_native.so alone is wanted")
        for name in libraries:
            dynamic = ELFFile(io.BytesIO(archive.read(name))).get_section_by_name(".dynamic")
            needed = [entry.needed for entry in dynamic.iter_tags() if entry.entry.d_tag == "DT_NEEDED"]
            faults += [f"{name} needs {entry}" for entry in needed if not entry.startswith(ALLOWED_LIBRARIES)]
        if "xds/py.typed" not in names:
            faults.append("xds/py.typed is missing")
        faults += [f"{name} does not belong into it" for name in names if not name.startswith(("xds/", "xpu_direct_"))]
        faults += [f"{name}: sources do not belong into it" for name in names if name.endswith((".cpp", ".h", ".pyc"))]
    if faults:
        raise SystemExit(f"{wheel.name} is wrong:\n  " + "\n  ".join(faults))
    print(f"{wheel.name}: version {version}, {wheel.stat().st_size >> 10} KiB, one library that needs libc alone")


def try_out(wheel: Path, interpreter: str, folder: Path) -> None:
    """Install the wheel in a clean environment of ``interpreter`` and use it there."""
    shutil.rmtree(folder, ignore_errors=True)
    run(interpreter, "-m", "venv", folder)
    run(folder / "bin/python", "-m", "pip", "install", "-q", "--disable-pip-version-check", wheel)
    # -P: the repository's own folder must not stand in for the installed package.
    run(folder / "bin/python", "-P", ROOT / "tools/smoke.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", action="append", help="an interpreter to try the wheel with; may be given again")
    given = parser.parse_args()
    raw = ROOT / "build/wheel"
    wheel = repair(build(raw), raw, ROOT / "dist")
    verify(wheel)
    for number, interpreter in enumerate(given.python or [sys.executable]):
        try_out(wheel, interpreter, ROOT / f"build/try-{number}")
    print(wheel.relative_to(ROOT))


main()
