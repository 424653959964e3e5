"""Unbounded: all experts are on the device from the start, whatever the capacity. The bound of everything.
No knob.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from pyspac.lab.policy import Eviction, Keys, register


@register("eviction", "unbounded")
class Unbounded(Eviction):
    """Holds everything; there are no misses."""

    is_fixed: ClassVar[bool] = True

    def preload(self) -> Keys:
        """Return every expert."""
        return np.flatnonzero(self.run.cache.bytes_of > 0)
