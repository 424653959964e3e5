"""Belady: the expert whose next use lies farthest ahead leaves, or is not kept at all (Belady 1966).

Knows the whole trace, so it is a bound and no policy: no demand-only policy misses less often. No knob.
"""

from __future__ import annotations

from typing import ClassVar

from pyspac.lab.policy import Bools, Demand, Eviction, register


@register("eviction", "belady")
class Belady(Eviction):
    """Worth falls with the time to the next use; newcomers compete with residents."""

    may_bypass: ClassVar[bool] = True

    def start(self) -> None:
        """Look up everybody's first use."""
        self.worth = -self.run.workload.first_use.astype(float)

    def use(self, demand: Demand, is_hit: Bools) -> None:
        """Look up the next use."""
        self.worth[demand.keys] = -demand.next_use.astype(float)
