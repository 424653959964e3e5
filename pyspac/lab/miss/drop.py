"""Drop: leave out missing experts of low rank, fetch the others (Skliar et al. 2025; SpecMD 3.1.2, "drop
priority").

Lossy: the report says how much of the router's weight was kept. Knobs: `keep`, ranks that are never left
out (an expert counts by the best rank that any token gives it), and `host` = 1, which has the host compute
what is kept.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from pyspac.lab.events import Access
from pyspac.lab.policy import DROP, FETCH, HOST, Miss, MissPlan
from pyspac.lab.registry import register


@register("drop")
class Drop(Miss):
    """Models tolerate a changed expert beyond their two best ones."""

    knobs: ClassVar[dict[str, float]] = {"keep": 2, "host": 0}
    limits: ClassVar[dict[str, tuple[float, float]]] = {"keep": (0, 1e4), "host": (0, 1)}

    def leaves_to_host(self) -> bool:
        """If asked to."""
        return bool(self.knob["host"])

    def handle(self, access: Access) -> MissPlan:
        """Keep what is some token's first or second choice."""
        is_kept = access.demand.rank[access.missing] < self.knob["keep"]
        return MissPlan(np.where(is_kept, HOST if self.leaves_to_host() else FETCH, DROP).astype(np.int8))
