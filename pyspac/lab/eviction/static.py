"""Static: the last layers' experts live on the device, the first layers' on the host (llama.cpp's
`--n-cpu-moe N`).

N follows from the capacity: as many whole layers as it holds, from the last one backwards; a part of a
layer does not fit. Nothing is ever copied. No knob.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from pyspac.lab.demand import Keys
from pyspac.lab.policy import Eviction
from pyspac.lab.registry import register


@register("static")
class Static(Eviction):
    """Keeps whole layers."""

    is_fixed: ClassVar[bool] = True
    default_miss: ClassVar[str] = "host"

    def preload(self) -> Keys:
        """Return the experts of the layers that fit, in the capacity's bytes whatever their layout group."""
        g, room = self.view.geometry, self.view.capacity_bytes
        chosen: list[int] = []
        for il in range(g.n_layer - 1, -1, -1):
            size = g.n_expert * g.expert_bytes[il]
            if 0 < size <= room:
                room -= size
                chosen += range(il * g.n_expert, (il + 1) * g.n_expert)
            elif size > room:
                break
        return np.array(chosen, np.intp)
