"""Score-based: the expert with the lowest accumulated router weight leaves (Zhu et al. 2025; specmd.txt,
B). No knob.
"""

from __future__ import annotations

from pyspac.lab.policy import Bools, Demand, Eviction, register


@register("eviction", "score")
class Score(Eviction):
    """Worth is the sum of all router weights the expert was ever given."""

    def use(self, demand: Demand, is_hit: Bools) -> None:
        """Add the step's weights."""
        self.worth[demand.keys] += demand.weight
