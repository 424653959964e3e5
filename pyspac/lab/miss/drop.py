"""Drop: leave out missing experts of low rank, fetch the others (Skliar et al. 2025; SpecMD 3.1.2).

Lossy: the report says how much of the router's weight was kept. Knob: `keep`, ranks that are always fetched.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from pyspac.lab.events import Access
from pyspac.lab.policy import DROP, FETCH, Miss, MissPlan
from pyspac.lab.registry import register


@register("drop")
class Drop(Miss):
    """Models tolerate a changed expert beyond their two best ones."""

    knobs: ClassVar[dict[str, float]] = {"keep": 2}

    def handle(self, access: Access) -> MissPlan:
        """Fetch what is some token's first or second choice."""
        is_kept = access.demand.rank[access.missing] < self.knob["keep"]
        return MissPlan(np.where(is_kept, FETCH, DROP).astype(np.int8))
