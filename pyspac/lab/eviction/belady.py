"""Belady: the expert whose next use lies farthest ahead leaves, or is not kept at all (Belady 1966).

Knows the whole trace, so it is a bound and no policy: no demand-only policy misses less often. No knob.
"""

from __future__ import annotations

from typing import ClassVar

from pyspac.lab.events import Access
from pyspac.lab.policy import Eviction
from pyspac.lab.registry import register
from pyspac.lab.view import OracleView


@register("belady")
class Belady(Eviction):
    """Worth falls with the time to the next use; newcomers compete with residents."""

    may_bypass: ClassVar[bool] = True
    is_clairvoyant: ClassVar[bool] = True
    view: OracleView

    def start(self) -> None:
        """Look up everybody's first use."""
        self.worth = -self.view.future.first_use.astype(float)

    def on_access(self, access: Access) -> None:
        """Look up the next use."""
        demand = access.demand
        self.worth[demand.keys] = -self.view.future.next_use(access.step, demand.il).astype(float)
