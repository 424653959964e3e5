"""Drop-priority cascade: the best ranks in full precision, the next ones in low precision, the rest left out
(SpecMD, Figure 7).

The paper names it and gives no rule; this reading joins its drop policy to its cascade. Lossy: the report
says how much of the router's weight was kept, and which share of it met a low-precision copy. Knobs: `keep`,
ranks in full precision, `low`, ranks that come at all, and `share` of the bytes that low precision takes.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from pyspac.lab.events import Access
from pyspac.lab.policy import DROP, FETCH, Miss, MissPlan
from pyspac.lab.registry import register


@register("drop-priority-cascade")
class DropPriorityCascade(Miss):
    """Loses precision first, experts then."""

    knobs: ClassVar[dict[str, float]] = {"keep": 2, "low": 4, "share": 0.5}
    limits: ClassVar[dict[str, tuple[float, float]]] = {"keep": (0, 1e4), "low": (0, 1e4), "share": (0, 1)}

    def handle(self, access: Access) -> MissPlan:
        """Sort the misses by rank."""
        rank = access.demand.rank[access.missing]
        share = np.where(rank < self.knob["keep"], 1.0, self.knob["share"])
        return MissPlan(np.where(rank < self.knob["low"], FETCH, DROP).astype(np.int8), share)
