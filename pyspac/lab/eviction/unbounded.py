"""Unbounded: all experts are on the device from the start, whatever the capacity. The bound of everything.
No knob.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from pyspac.lab.demand import Keys
from pyspac.lab.policy import Eviction
from pyspac.lab.registry import register


@register("unbounded")
class Unbounded(Eviction):
    """Holds everything; there are no misses."""

    is_fixed: ClassVar[bool] = True
    ignores_capacity: ClassVar[bool] = True
    default_miss: ClassVar[str] = "host"

    def preload(self) -> Keys:
        """Return every expert."""
        return np.flatnonzero(self.view.cache.bytes_of > 0)
