"""Fetch priority: full precision, but under pressure the least important misses come in fewer bits, as 8:4:2
(SpecMD 3.1.2, 5.4).

Pressure means that no slot is free. Importance is the router's weight. The paper degrades the lower 60 % of
a layer's experts and does not say how they share the two lower precisions: here half and half. Lossy: the
report says which share of the router's weight met a low-precision copy. Knobs: `low` and `lowest`, shares of
a layer's experts that come in the lower precisions or in the lowest one, `share` and `lowest_share`, of the
bytes that these take. `lowest` = 0: one lower precision.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from pyspac.lab.events import Access
from pyspac.lab.policy import FETCH, Miss, MissPlan
from pyspac.lab.registry import register


@register("fetch-priority")
class FetchPriority(Miss):
    """Falls back by importance."""

    knobs: ClassVar[dict[str, float]] = {"low": 0.6, "lowest": 0.3, "share": 0.5, "lowest_share": 0.25}
    limits: ClassVar[dict[str, tuple[float, float]]] = dict.fromkeys(knobs, (0.0, 1.0))

    def handle(self, access: Access) -> MissPlan:
        """Fetch all; degrade those in the lower part of the layer's weights."""
        cache, weight, missing = self.view.cache, access.demand.weight, access.missing
        share = np.ones(len(missing))
        if not cache.n_free(cache.group_of[access.demand.keys[0]]):
            for part, its_share in (("low", "share"), ("lowest", "lowest_share")):
                if self.knob[part]:
                    limit = np.quantile(weight, self.knob[part])
                    share[weight[missing] <= limit] = self.knob[its_share]
        return MissPlan(np.full(len(missing), FETCH, np.int8), share)
