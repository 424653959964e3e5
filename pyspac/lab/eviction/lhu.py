"""LHU: the expert with the fewest high-precision uses leaves (HOBBIT; SpecMD, Appendix B).

Only uses of a full-precision copy count, so experts that were good enough in low precision go first. Meant
for the miss policies `fetch-lowest-bit` and `fetch-priority`; with `fetch` it equals LFU. No knob.
"""

from __future__ import annotations

from pyspac.lab.events import Access, Loaded
from pyspac.lab.policy import Eviction
from pyspac.lab.registry import register


@register("lhu")
class Lhu(Eviction):
    """Worth is the count of high-precision uses; the fraction orders equals by last use."""

    def start(self) -> None:
        """Count nothing yet."""
        super().start()
        self.count = self.worth.copy()

    def on_access(self, access: Access) -> None:
        """Count the uses; a miss is counted when its copy turns out to be of full precision."""
        demand = access.demand
        hits = demand.keys[access.is_hit]
        self.count[hits] += self.view.cache.share[hits] >= 1.0
        now = access.step * self.view.n_layer + demand.il
        self.worth[demand.keys] = self.count[demand.keys] + now * 1e-9

    def on_loaded(self, event: Loaded) -> None:
        """Count a full-precision copy as one use."""
        self.count[event.key] += event.share >= 1.0
        self.worth[event.key] = self.count[event.key] + (self.worth[event.key] % 1.0)
