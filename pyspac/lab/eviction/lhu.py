"""LHU: the expert with the fewest high-precision uses leaves (HOBBIT; specmd.txt, B).

Only uses of a full-precision copy count, so experts that were good enough in low precision go first. Meant
for the miss policies `fetch-lowest-bit` and `fetch-priority`; with `fetch` it equals LFU. No knob.
"""

from __future__ import annotations

from pyspac.lab.policy import Bools, Demand, Eviction, Keys, register


@register("eviction", "lhu")
class Lhu(Eviction):
    """Worth is the count of high-precision uses; the fraction orders equals by last use."""

    def start(self) -> None:
        """Count nothing yet."""
        super().start()
        self.count = self.worth.copy()

    def use(self, demand: Demand, is_hit: Bools) -> None:
        """Count the uses; a miss is counted when its copy turns out to be of full precision."""
        keys = demand.keys[is_hit]
        self.count[keys] += self.run.cache.share[keys] >= 1.0
        self._stamp(demand.keys)

    def loaded(self, key: int) -> None:
        """Count a full-precision copy as one use."""
        self.count[key] += self.run.cache.share[key] >= 1.0
        self.worth[key] = self.count[key] + (self.worth[key] % 1.0)

    def _stamp(self, keys: Keys) -> None:
        now = self.run.step_index * self.run.n_layer + self.run.il
        self.worth[keys] = self.count[keys] + now * 1e-9
