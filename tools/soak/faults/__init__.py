"""The faults of the soak, each a class: what it does to a running server, and what must hold meanwhile.

A fault is applied by `apply`, which returns whether there was anything to do and raises FaultError where the
server did not stand it as promised. Faults with the same `resource` never overlap; others do.
"""

from __future__ import annotations

from typing import Final

from tools.soak.faults.board import Remove, Scribble, Truncate, Twin
from tools.soak.faults.connections import HalfOpen
from tools.soak.faults.disks import FullDisk, FullShm
from tools.soak.faults.fault import Fault, Site
from tools.soak.faults.requests import Adapters, Disconnect, Slots
from tools.soak.faults.scheduler import Kill, Stop
from tools.soak.faults.threads import NoThreads

FAULTS: Final[tuple[type[Fault], ...]] = (
    Kill, Stop, Scribble, Truncate, Remove, Twin, Disconnect, HalfOpen, Slots, Adapters, FullShm, FullDisk,
    NoThreads,
)  # fmt: skip


def make_faults(names: list[str], site: Site, seed: int) -> list[Fault]:
    """Those of the names, in FAULTS' order."""
    return [kind(site, seed) for kind in FAULTS if kind.name in names]
