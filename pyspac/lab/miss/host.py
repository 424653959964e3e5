"""Host: compute missing experts on the host, while the device computes the others (Fiddler; pyspac's
engine). No knob.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pyspac.lab.policy import HOST, Demand, Miss, MissPlan, register


@register("miss", "host")
class Host(Miss):
    """Copies nothing: only the prefetch policy brings experts to the device."""

    def handle(self, demand: Demand, missing: npt.NDArray[np.intp]) -> MissPlan:
        """Leave all to the host."""
        return MissPlan(np.full(len(missing), HOST, np.int8))
