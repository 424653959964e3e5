"""History: copy the experts of the next layers that this sequence used most (as MoE-Infinity's activation
matrix).

Needs no router output, so it can look several layers ahead. Knob: `depth`, layers ahead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from pyspac.lab.events import Access
from pyspac.lab.policy import Copies, Prefetch
from pyspac.lab.registry import register


@register("history")
class History(Prefetch):
    """Counts activations per expert, and copies each coming layer's n_expert_used most frequent."""

    knobs: ClassVar[dict[str, float]] = {"depth": 3}
    limits: ClassVar[dict[str, tuple[float, float]]] = {"depth": (0, 1e4)}

    def start(self) -> None:
        """Count nothing yet."""
        self.count = np.zeros((self.view.n_layer, self.view.n_expert))

    def after_router(self, access: Access) -> Iterator[Copies]:
        """Count this layer, then copy for the next ones, nearest first."""
        view, il = self.view, access.demand.il
        self.count.ravel()[access.demand.keys] += access.demand.rows
        for ahead in range(il + 1, min(il + 1 + int(self.knob["depth"]), view.n_layer)):
            best = np.argsort(-self.count[ahead], kind="stable")[: view.geometry.n_expert_used]
            yield Copies(ahead * view.n_expert + best[self.count[ahead, best] > 0])
