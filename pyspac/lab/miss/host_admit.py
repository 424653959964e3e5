"""Host and admit: compute missing experts on the host, and copy some of them in the background for the next
time.

Adaptive caches of llama.cpp forks do this with a small cap per layer, since caches that admit freely thrash
the link. Knob: `per_layer`, copies queued per layer and step.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from pyspac.lab.events import Access
from pyspac.lab.policy import HOST, Copies, Miss, MissPlan
from pyspac.lab.registry import register


@register("host-admit")
class HostAdmit(Miss):
    """The misses with most rows are queued behind everything else."""

    knobs: ClassVar[dict[str, float]] = {"per_layer": 2}
    limits: ClassVar[dict[str, tuple[float, float]]] = {"per_layer": (0, 1e4)}

    def handle(self, access: Access) -> MissPlan:
        """Leave all to the host; queue the busiest."""
        demand, missing = access.demand, access.missing
        busiest = np.argsort(-demand.rows[missing], kind="stable")[: int(self.knob["per_layer"])]
        admit = Copies(demand.keys[missing[busiest]], level=0)
        return MissPlan(np.full(len(missing), HOST, np.int8), admit=admit)
