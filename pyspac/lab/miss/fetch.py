"""Fetch: copy every missing expert to the device and wait for it (Eliseev and Mazur 2023; llama.cpp's
cache). No knob.
"""

from __future__ import annotations

import numpy as np

from pyspac.lab.events import Access
from pyspac.lab.policy import FETCH, Miss, MissPlan
from pyspac.lab.registry import register


@register("fetch")
class Fetch(Miss):
    """Everything is computed on the device."""

    def handle(self, access: Access) -> MissPlan:
        """Fetch all."""
        return MissPlan(np.full(len(access.missing), FETCH, np.int8))
