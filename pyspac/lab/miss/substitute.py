"""Substitute: compute a resident expert of near score instead of a missing one (Zhu et al. 2025; specmd.txt
3.1.2).

Lossy. Score is the router's probability where the trace holds all logits, else the expert's mean weight so
far. What finds no substitute within the tolerance is fetched. Knob: `tolerance`, the largest difference of
scores.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from pyspac.lab.policy import FETCH, SUBSTITUTE, Demand, Floats, Miss, MissPlan, register


@register("miss", "substitute")
class Substitute(Miss):
    """Takes the resident expert of the layer, not in use already, whose score is nearest."""

    knobs: ClassVar[dict[str, float]] = {"tolerance": 0.1}
    tolerance: float

    def start(self) -> None:
        """Know no scores yet."""
        self.score = np.zeros((self.run.n_layer, self.run.n_expert))
        self.count = np.zeros((self.run.n_layer, self.run.n_expert))

    def handle(self, demand: Demand, missing: npt.NDArray[np.intp]) -> MissPlan:
        """Deal out the residents, nearest score first, each to one missing expert."""
        il, first = demand.il, demand.il * self.run.n_expert
        score = self._scores(demand)
        spare = np.flatnonzero(self.run.cache.is_resident(np.arange(first, first + self.run.n_expert)))
        spare = spare[~np.isin(spare + first, demand.keys)]
        fate = np.full(len(missing), FETCH, np.int8)
        for i, expert in enumerate(demand.keys[missing] - il * self.run.n_expert):
            distance = np.abs(score[spare] - score[expert])
            if len(spare) and distance.min() <= self.tolerance:
                spare = np.delete(spare, int(distance.argmin()))
                fate[i] = SUBSTITUTE
        return MissPlan(fate)

    def _scores(self, demand: Demand) -> Floats:
        logits = self.run.trace.logits
        if logits is not None:
            z = logits[self.run.step.tokens, demand.il].astype(np.float64)
            e = np.exp(z - z.max(axis=1, keepdims=True))
            return np.asarray((e / e.sum(axis=1, keepdims=True)).mean(axis=0))
        experts = demand.keys - demand.il * self.run.n_expert
        self.score[demand.il, experts] += demand.weight
        self.count[demand.il, experts] += demand.rows
        return np.asarray(self.score[demand.il] / np.maximum(self.count[demand.il], 1.0))
