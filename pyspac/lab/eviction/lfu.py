"""LFU: the expert used in the fewest steps so far leaves, ties by oldest use (specmd.txt, B). No knob."""

from __future__ import annotations

from pyspac.lab.policy import Bools, Demand, Eviction, register


@register("eviction", "lfu")
class Lfu(Eviction):
    """Worth is the count of uses over the whole history; the fraction orders equals by last use."""

    def start(self) -> None:
        """Count nothing yet."""
        super().start()
        self.count = self.worth.copy()

    def use(self, demand: Demand, is_hit: Bools) -> None:
        """Count one use per expert and step."""
        self.count[demand.keys] += 1.0
        now = self.run.step_index * self.run.n_layer + demand.il
        self.worth[demand.keys] = self.count[demand.keys] + now * 1e-9
