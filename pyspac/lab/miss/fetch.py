"""Fetch: copy every missing expert to the device and wait for it (Eliseev and Mazur 2023; llama.cpp's
cache). No knob.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pyspac.lab.policy import FETCH, Demand, Miss, MissPlan, register


@register("miss", "fetch")
class Fetch(Miss):
    """Everything is computed on the device."""

    def handle(self, demand: Demand, missing: npt.NDArray[np.intp]) -> MissPlan:
        """Fetch all."""
        return MissPlan(np.full(len(missing), FETCH, np.int8))
