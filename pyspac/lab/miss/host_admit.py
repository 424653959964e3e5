"""Host and admit: compute missing experts on the host, and copy some of them in the background for the next
time.

Adaptive caches of llama.cpp forks do this with a small cap per layer, since caches that admit freely thrash
the link. Knob: `per_layer`, copies queued per layer and step.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from pyspac.lab.policy import HOST, Demand, Miss, MissPlan, register


@register("miss", "host-admit")
class HostAdmit(Miss):
    """The misses with most rows are queued behind everything else."""

    knobs: ClassVar[dict[str, float]] = {"per_layer": 2}
    per_layer: float

    def handle(self, demand: Demand, missing: npt.NDArray[np.intp]) -> MissPlan:
        """Leave all to the host; queue the busiest."""
        order = np.argsort(-demand.rows[missing], kind="stable")[: int(self.per_layer)]
        self.run.prefetch(demand.keys[missing[order]], level=0)
        return MissPlan(np.full(len(missing), HOST, np.int8))
