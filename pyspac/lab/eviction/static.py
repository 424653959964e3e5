"""Static: the last layers' experts live on the device, the first layers' on the host (llama.cpp's `--n-cpu-
moe N`).

N follows from the capacity: as many whole layers as it holds, from the last one backwards; a part of a
layer does not fit. Nothing is ever copied. No knob.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from pyspac.lab.policy import Eviction, Keys, register
from pyspac.lab.setup import capacity_bytes


@register("eviction", "static")
class Static(Eviction):
    """Keeps whole layers."""

    is_fixed: ClassVar[bool] = True

    def preload(self) -> Keys:
        """Return the experts of the layers that fit, in the capacity's bytes whatever their layout group."""
        run, g = self.run, self.run.geometry
        room = capacity_bytes(run.setup.capacity, g.total_bytes)
        chosen: list[int] = []
        for il in range(g.n_layer - 1, -1, -1):
            size = g.n_expert * g.expert_bytes[il]
            if 0 < size <= room:
                room -= size
                chosen += range(il * g.n_expert, (il + 1) * g.n_expert)
            elif size > room:
                break
        return np.array(chosen, np.intp)
