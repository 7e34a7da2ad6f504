"""Python, packages, clashing distributions, the native core. Layer: top, part of the doctor."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from xds.doctor import Finding

_SUPPORTED = (3, 11), (3, 13)
_PACKAGES = ("xpu-direct-storage", "fsspec", "numpy", "ml-dtypes")


def python(root: Path) -> Sequence[Finding]:
    """The interpreter and the system it runs on."""
    version = sys.version_info[:2]
    what = f"{platform.python_implementation()} {platform.python_version()}, {platform.system()} {platform.release()}"
    what += f", {platform.machine()}"
    if sys.platform != "linux":
        return [Finding("Python", "absent", what, "nothing works: XDS needs Linux", "run it on Linux", required=True)]
    if not _SUPPORTED[0] <= version <= _SUPPORTED[1]:
        return [Finding("Python", "limited", what, "not tested with this version", "use Python 3.11 to 3.13")]
    return [Finding("Python", "ok", what)]


def packages(root: Path) -> Sequence[Finding]:
    """Versions of this package and of what it stands on."""
    shown, missing = [], []
    for name in _PACKAGES:
        try:
            shown.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        return [
            Finding(
                "packages",
                "absent",
                f"missing: {', '.join(missing)}",
                "imports and URLs fail",
                f"pip install {' '.join(missing)}",
                required=True,
            )
        ]
    return [Finding("packages", "ok", ", ".join(shown))]


def clash(root: Path) -> Sequence[Finding]:
    """Other distributions that install a package of our names."""
    from xds import distributions

    fault = distributions.clash()
    if fault is None:
        return [Finding("other distributions", "ok", "none installs a package named xds, nvmeof or nfsrdma")]
    return [
        Finding(
            "other distributions",
            "limited",
            fault,
            "files of one overwrite those of the other: imports fail or give the wrong package",
            "uninstall it as said",
        )
    ]


def native_core(root: Path) -> Sequence[Finding]:
    """The shared library."""
    from xds import native

    try:
        library = native.library()
    except ImportError as error:
        return [
            Finding(
                "native core",
                "absent",
                str(error),
                "nothing can be read",
                "install a wheel made by tools/build-wheel, or `pip install .` with CMake and a C++20 compiler",
                required=True,
            )
        ]
    return [Finding("native core", "ok", f"{library._name}, ABI {native.ABI_VERSION}")]
