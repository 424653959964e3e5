"""Substitute: compute a resident expert of near score instead of a missing one (Zhu et al. 2025; SpecMD
3.1.2).

Lossy. Score is the router's probability where the trace holds all logits, else the expert's mean weight so
far. What finds no substitute within the tolerance is fetched. Knobs: `tolerance`, the largest difference of
scores, and `host` = 1, which has the host compute instead of fetching.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from pyspac.lab.demand import Floats
from pyspac.lab.events import Access
from pyspac.lab.policy import FETCH, HOST, SUBSTITUTE, Miss, MissPlan
from pyspac.lab.registry import register


@register("substitute")
class Substitute(Miss):
    """Takes the resident expert of the layer, not in use already, whose score is nearest."""

    knobs: ClassVar[dict[str, float]] = {"tolerance": 0.1, "host": 0}
    limits: ClassVar[dict[str, tuple[float, float]]] = {"tolerance": (0, 1), "host": (0, 1)}

    def leaves_to_host(self) -> bool:
        """If asked to."""
        return bool(self.knob["host"])

    def start(self) -> None:
        """Know no scores yet."""
        self.weight = np.zeros((self.view.n_layer, self.view.n_expert))
        self.count = np.zeros((self.view.n_layer, self.view.n_expert))

    def handle(self, access: Access) -> MissPlan:
        """Deal out the residents, nearest score first, each to one missing expert."""
        keys, missing, n_expert = access.demand.keys, access.missing, self.view.n_expert
        score, first = self._scores(access), access.demand.il * n_expert
        spare = np.flatnonzero(self.view.cache.is_resident(np.arange(first, first + n_expert)))
        spare = spare[~np.isin(spare + first, keys)]
        fate = np.full(len(missing), HOST if self.leaves_to_host() else FETCH, np.int8)
        for i, expert in enumerate(keys[missing] - first):
            distance = np.abs(score[spare] - score[expert])
            if len(spare) and distance.min() <= self.knob["tolerance"]:
                spare = np.delete(spare, int(distance.argmin()))
                fate[i] = SUBSTITUTE
        return MissPlan(fate)

    def _scores(self, access: Access) -> Floats:
        """Return [n_expert] of the layer."""
        if access.router is not None:
            return np.asarray(access.router.probabilities().mean(axis=0))
        demand = access.demand
        experts = demand.keys - demand.il * self.view.n_expert
        self.weight[demand.il, experts] += demand.weight
        self.count[demand.il, experts] += demand.rows
        return np.asarray(self.weight[demand.il] / np.maximum(self.count[demand.il], 1.0))
