"""Fetch lowest bit: always fetch the smallest precision there is, to wait least (SpecMD 3.1.2).

Lossy: the report says which share of the router's weight met a low-precision copy. Knob: `share` of the
expert's bytes that the lowest precision takes (a half: 8 to 4 bits).
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from pyspac.lab.events import Access
from pyspac.lab.policy import FETCH, Miss, MissPlan
from pyspac.lab.registry import register


@register("fetch-lowest-bit")
class FetchLowestBit(Miss):
    """A slot holds either precision; the bytes moved differ."""

    knobs: ClassVar[dict[str, float]] = {"share": 0.5}
    limits: ClassVar[dict[str, tuple[float, float]]] = {"share": (0, 1)}

    def handle(self, access: Access) -> MissPlan:
        """Fetch all, in low precision."""
        n = len(access.missing)
        return MissPlan(np.full(n, FETCH, np.int8), np.full(n, self.knob["share"]))
