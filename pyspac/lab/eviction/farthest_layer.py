"""Farthest layer (FLD): the expert whose layer runs last from here leaves (HOBBIT; SpecMD, Appendix B).

Distance counts layers ahead of the present one, round the end of the forward pass. No knob.
"""

from __future__ import annotations

import numpy as np

from pyspac.lab.demand import Floats, Keys
from pyspac.lab.policy import Eviction
from pyspac.lab.registry import register


@register("farthest-layer")
class FarthestLayer(Eviction):
    """Worth falls with the distance to the layer's next turn."""

    def rank(self, candidates: Keys) -> Floats:
        """Return minus the layers to go; the present layer itself has just had its turn."""
        ahead = (self.view.layer_of[candidates] - self.view.il - 1) % self.view.n_layer
        return np.asarray(-ahead, np.float64)
