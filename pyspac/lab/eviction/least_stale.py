"""Least-Stale: experts last used, or prefetched, in an earlier forward pass leave first (specmd.txt 4.2).

Among stale ones the lowest layer leaves first, and current ones only when no stale one is left, again by
layer. Knob: `cyclic` = 1 reads "layer order" as beginning behind the running layer: who has longest to wait
leaves first.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from pyspac.lab.policy import Bools, Demand, Eviction, Floats, Keys, register


@register("eviction", "least-stale")
class LeastStale(Eviction):
    """Worth is the layer, plus a whole pass for experts of the present pass."""

    knobs: ClassVar[dict[str, float]] = {"cyclic": 0}
    cyclic: float

    def start(self) -> None:
        """Mark everything as never used."""
        super().start()
        self.last_step = np.full(self.run.n_cell, -1)

    def use(self, demand: Demand, is_hit: Bools) -> None:
        """Make the layer's experts current; equals leave by oldest use."""
        self.last_step[demand.keys] = self.run.step_index
        self.worth[demand.keys] = self.run.step_index * 1e-6

    def loaded(self, key: int) -> None:
        """Make a prefetched expert current."""
        self.last_step[key] = self.run.step_index

    def rank(self, candidates: Keys) -> Floats:
        """Return the order of the two queues, stale before current."""
        is_current = self.last_step[candidates] == self.run.step_index
        layer = self.run.layer_of[candidates]
        if self.cyclic:
            layer = -((layer - self.run.il - 1) % self.run.n_layer)
        return np.asarray(is_current * float(self.run.n_layer) + layer + self.worth[candidates])
