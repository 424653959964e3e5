"""History: copy the experts of the next layers that this sequence used most (as MoE-Infinity's activation
matrix).

Needs no router output, so it can look several layers ahead. Knob: `depth`, layers ahead.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from pyspac.lab.policy import Demand, Prefetch, register


@register("prefetch", "history")
class History(Prefetch):
    """Counts activations per expert, and copies each coming layer's n_expert_used most frequent."""

    knobs: ClassVar[dict[str, float]] = {"depth": 3}
    depth: float

    def start(self) -> None:
        """Count nothing yet."""
        self.count = np.zeros((self.run.n_layer, self.run.n_expert))

    def after_router(self, demand: Demand) -> None:
        """Count this layer, then submit for the next ones, nearest first."""
        self.count.ravel()[demand.keys] += demand.rows
        n = self.run.geometry.n_expert_used
        for il in range(demand.il + 1, min(demand.il + 1 + int(self.depth), self.run.n_layer)):
            best = np.argsort(-self.count[il], kind="stable")[:n]
            self.run.prefetch(il * self.run.n_expert + best[self.count[il, best] > 0])
