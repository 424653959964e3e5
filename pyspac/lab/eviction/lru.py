"""LRU: the expert used longest ago leaves. The reference that mainline caches use. No knob."""

from __future__ import annotations

import numpy as np

from pyspac.lab.events import Access, Loaded
from pyspac.lab.policy import Eviction
from pyspac.lab.registry import register


@register("lru")
class Lru(Eviction):
    """Worth is the time of the last use; a prefetched expert counts as used when it arrives."""

    def start(self) -> None:
        """Start the clock."""
        super().start()
        self.clock = self.layer_began = 1

    def on_access(self, access: Access) -> None:
        """Stamp the layer's experts, in order."""
        keys = access.demand.keys
        self.layer_began = self.clock
        self.clock += len(keys)
        self.worth[keys] = np.arange(self.layer_began, self.clock)

    def on_loaded(self, event: Loaded) -> None:
        """Stamp a prefetched expert; one that the layer asked for has its stamp."""
        if self.worth[event.key] < self.layer_began:
            self.worth[event.key] = self.clock
            self.clock += 1
