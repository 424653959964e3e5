"""Fetch priority: full precision, but under pressure the least important misses come in low precision
(specmd.txt 5.4).

Pressure means that no slot is free. Importance is the router's weight. Knobs: `low`, the share of a layer's
experts that counts as least important, and `share` of the bytes that low precision takes.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from pyspac.lab.policy import FETCH, Demand, Miss, MissPlan, register


@register("miss", "fetch-priority")
class FetchPriority(Miss):
    """Falls back by importance."""

    knobs: ClassVar[dict[str, float]] = {"low": 0.6, "share": 0.5}
    low: float
    share: float

    def handle(self, demand: Demand, missing: npt.NDArray[np.intp]) -> MissPlan:
        """Fetch all; degrade those in the lower part of the layer's weights."""
        cache = self.run.cache
        share = np.ones(len(missing))
        if not cache.free[cache.group_of[demand.keys[0]]]:
            limit = np.quantile(demand.weight, self.low)
            share[demand.weight[missing] <= limit] = self.share
        return MissPlan(np.full(len(missing), FETCH, np.int8), share)
