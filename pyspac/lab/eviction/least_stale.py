"""Least-Stale: experts last used, or prefetched, in an earlier forward pass leave first (SpecMD 4.2).

Among stale ones the lowest layer leaves first, and current ones only when no stale one is left, again by
layer. Knob: `cyclic` = 1 reads "layer order" as beginning behind the running layer: who has longest to wait
leaves first.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from pyspac.lab.demand import Floats, Keys
from pyspac.lab.events import Access, Loaded
from pyspac.lab.policy import Eviction
from pyspac.lab.registry import register


@register("least-stale")
class LeastStale(Eviction):
    """Worth is the layer, plus a whole pass for experts of the present pass."""

    knobs: ClassVar[dict[str, float]] = {"cyclic": 0}
    limits: ClassVar[dict[str, tuple[float, float]]] = {"cyclic": (0, 1)}

    def start(self) -> None:
        """Mark everything as never used."""
        super().start()
        self.last_step = np.full(self.view.n_cell, -1)

    def on_access(self, access: Access) -> None:
        """Make the layer's experts current; equals leave by oldest use."""
        self.last_step[access.demand.keys] = access.step
        self.worth[access.demand.keys] = access.step * 1e-6

    def on_loaded(self, event: Loaded) -> None:
        """Make a prefetched expert current."""
        self.last_step[event.key] = event.step

    def rank(self, candidates: Keys) -> Floats:
        """Return the order of the two queues, stale before current."""
        view = self.view
        is_current = self.last_step[candidates] == view.step
        layer = view.layer_of[candidates]
        if self.knob["cyclic"]:
            layer = -((layer - view.il - 1) % view.n_layer)
        return np.asarray(is_current * float(view.n_layer) + layer + self.worth[candidates])
