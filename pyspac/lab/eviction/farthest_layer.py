"""Farthest layer (FLD): the expert whose layer runs last from here leaves (HOBBIT; specmd.txt, B).

Distance counts layers ahead of the present one, round the end of the forward pass. No knob.
"""

from __future__ import annotations

import numpy as np

from pyspac.lab.policy import Eviction, Floats, Keys, register


@register("eviction", "farthest-layer")
class FarthestLayer(Eviction):
    """Worth falls with the distance to the layer's next turn."""

    def rank(self, candidates: Keys) -> Floats:
        """Return minus the layers to go; the present layer itself has just had its turn."""
        ahead = (self.run.layer_of[candidates] - self.run.il - 1) % self.run.n_layer
        return np.asarray(-ahead, np.float64)
