"""Farthest layer (FLD): the expert whose layer is farthest from the running one leaves (HOBBIT; SpecMD,
Appendix B).

The paper "computes the distance between each cached expert's layer and the current inference layer": |l - i|,
whichever way. Knob: `cyclic` = 1 counts the layers to go until the expert's next turn, round the end of the
forward pass.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from pyspac.lab.demand import Floats, Keys
from pyspac.lab.policy import Eviction
from pyspac.lab.registry import register


@register("farthest-layer")
class FarthestLayer(Eviction):
    """Worth falls with the distance to the expert's layer."""

    knobs: ClassVar[dict[str, float]] = {"cyclic": 0}
    limits: ClassVar[dict[str, tuple[float, float]]] = {"cyclic": (0, 1)}

    def rank(self, candidates: Keys) -> Floats:
        """Return minus the distance; cyclic: the present layer itself has just had its turn."""
        distance = self.view.layer_of[candidates] - self.view.il
        distance = (distance - 1) % self.view.n_layer if self.knob["cyclic"] else np.abs(distance)
        return np.asarray(-distance, np.float64)
