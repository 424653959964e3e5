"""Second chance (CLOCK): experts used since the hand last came by are spared once, the next one leaves.

An approximation of LRU that keeps one bit per expert (Corbato 1968). Knob: `spared`, how many laps a used
expert is spared.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from pyspac.lab.policy import Bools, Demand, Eviction, Keys, register


@register("eviction", "second-chance")
class SecondChance(Eviction):
    """The candidates come by slot, so the hand is a position among them."""

    knobs: ClassVar[dict[str, float]] = {"spared": 1}
    spared: float

    def start(self) -> None:
        """Nobody has a chance yet; the hand is at the first slot."""
        super().start()
        self.hand = 0

    def use(self, demand: Demand, is_hit: Bools) -> None:
        """Give chances; `worth` [n_layer * n_expert] counts them."""
        self.worth[demand.keys] = self.spared

    def victims(self, candidates: Keys, n: int) -> npt.NDArray[np.intp]:
        """Turn the hand until n experts without a chance are found."""
        chosen: list[int] = []
        while len(chosen) < n:
            self.hand = (self.hand + 1) % len(candidates)
            key = candidates[self.hand]
            if self.hand in chosen:
                continue
            if self.worth[key] > 0:
                self.worth[key] -= 1
            else:
                chosen.append(self.hand)
        return np.array(chosen, np.intp)
