"""LRU: the expert used longest ago leaves. The reference that mainline caches use. No knob."""

from __future__ import annotations

import numpy as np

from pyspac.lab.policy import Bools, Demand, Eviction, register


@register("eviction", "lru")
class Lru(Eviction):
    """Worth is the time of the last use; a prefetched expert counts as used when it arrives."""

    def start(self) -> None:
        """Start the clock."""
        super().start()
        self.clock = self.layer_began = 1

    def use(self, demand: Demand, is_hit: Bools) -> None:
        """Stamp the layer's experts, in order."""
        self.layer_began = self.clock
        self.clock += len(demand.keys)
        self.worth[demand.keys] = np.arange(self.layer_began, self.clock)

    def loaded(self, key: int) -> None:
        """Stamp a prefetched expert; one that the layer asked for has its stamp."""
        if self.worth[key] < self.layer_began:
            self.worth[key] = self.clock
            self.clock += 1
