"""What this machine can, what not, what to change. Layer: top, beside the command line, which it does not import.

:func:`examine` never raises for what is missing: each thing looked at gives one :class:`Finding`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

State = Literal["ok", "limited", "absent"]

NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at.

    Attributes:
        name: what was looked at.
        state: ``ok``, ``limited`` (works, with the cost named) or ``absent``.
        what: what is there.
        cost: what that costs.
        action: what to do about it.
        required: whether nothing works without it.
    """

    name: str
    state: State
    what: str
    cost: str = NOTHING
    action: str = NOTHING
    required: bool = False

    def as_dict(self) -> dict[str, str | bool]:
        """Return plain JSON-able values."""
        return asdict(self)


Check = Callable[[Path], Sequence[Finding]]


def checks() -> list[tuple[str, Check]]:
    """Return all checks with their names, in the order in which they are shown."""
    from xds.doctor import gpu, machine, software

    return [
        ("Python", software.python),
        ("packages", software.packages),
        ("other distributions", software.clash),
        ("native core", software.native_core),
        ("CPU", machine.cpu),
        ("GPU", gpu.gpu),
        ("CuPy", gpu.cupy),
        ("torch", gpu.torch),
        ("cuFile", gpu.cufile),
        ("io_uring", machine.io_uring),
        ("locked memory", machine.memlock),
        ("RDMA devices", machine.rdma),
        ("/dev/shm", machine.shared_memory),
        ("pages", machine.pages),
    ]


def examine(root: Path = Path("/")) -> list[Finding]:
    """Look at everything and return the findings.

    Args:
        root: the folder under which ``proc``, ``sys`` and ``dev`` are read.
    """
    findings: list[Finding] = []
    for name, check in checks():
        try:
            findings += check(root)
        except Exception as error:
            findings.append(
                Finding(
                    name,
                    "limited",
                    f"could not be examined: {type(error).__name__}: {error}",
                    "it is not known whether this part works",
                    "try it, and report this line if it works",
                )
            )
    return findings


def read_text(path: Path) -> str | None:
    """Return the stripped text of a small file of ``/proc`` or ``/sys``, or ``None`` if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
