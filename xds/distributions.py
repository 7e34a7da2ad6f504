"""Finds other distributions that install our package names. Layer: bottom; imports nothing of ours.

Two distributions that own one top-level package overwrite each other's files; whichever came last wins. The index has
a distribution ``nvmeof`` that installs a package of that name.
"""

from __future__ import annotations

import importlib.metadata
import re

#: Our distribution, in its normalised spelling.
OURS = "xpu-direct-storage"
#: The top-level packages that are ours.
PACKAGES = ("xds", "nvmeof", "nfsrdma")


def clash() -> str | None:
    """Return what to uninstall if a foreign distribution owns one of :data:`PACKAGES`, else ``None``.

    Reads the file lists of all installed distributions: tenths of a second; called when something failed, and by
    ``xds doctor``.
    """
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"] or ""
        if re.sub(r"[-_.]+", "-", name).lower() == OURS:
            continue
        for package in PACKAGES:
            if _owns(distribution, package):
                return (
                    f"the distribution {name!r} (version {distribution.version}) installs the package {package!r}, "
                    f"which {OURS} needs for itself; the two cannot be installed together. Remove it with "
                    f"`pip uninstall {name}`, then install {OURS} again"
                )
    return None


def _owns(distribution: importlib.metadata.Distribution, package: str) -> bool:
    if package in (distribution.read_text("top_level.txt") or "").split():
        return True
    record = distribution.read_text("RECORD") or ""
    return any(line.startswith((f"{package}/", f"{package}.py,")) for line in record.splitlines())
