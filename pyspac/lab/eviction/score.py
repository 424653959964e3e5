"""Score-based: the expert with the lowest accumulated router weight leaves (Zhu et al. 2025; SpecMD,
Appendix B). No knob.
"""

from __future__ import annotations

from pyspac.lab.events import Access
from pyspac.lab.policy import Eviction
from pyspac.lab.registry import register


@register("score")
class Score(Eviction):
    """Worth is the sum of all router weights the expert was ever given."""

    def on_access(self, access: Access) -> None:
        """Add the step's weights."""
        self.worth[access.demand.keys] += access.demand.weight
