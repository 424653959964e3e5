"""Fetch priority: full precision, but under pressure the least important misses come in low precision
(SpecMD 5.4).

Pressure means that no slot is free. Importance is the router's weight. Knobs: `low`, the share of a layer's
experts that counts as least important, and `share` of the bytes that low precision takes.
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

    knobs: ClassVar[dict[str, float]] = {"low": 0.6, "share": 0.5}

    def handle(self, access: Access) -> MissPlan:
        """Fetch all; degrade those in the lower part of the layer's weights."""
        cache, weight, missing = self.view.cache, access.demand.weight, access.missing
        share = np.ones(len(missing))
        if not cache.n_free(cache.group_of[access.demand.keys[0]]):
            limit = np.quantile(weight, self.knob["low"])
            share[weight[missing] <= limit] = self.knob["share"]
        return MissPlan(np.full(len(missing), FETCH, np.int8), share)
