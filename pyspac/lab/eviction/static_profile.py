"""Static by profile: the experts most used in the prompt live on the device, and stay (thecodacus' static
pack).

Per layout group the slots go to the experts with the most activations in the prompt. Nothing is ever
copied. No knob.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from pyspac.lab.demand import Keys
from pyspac.lab.policy import Eviction
from pyspac.lab.registry import register


@register("static-profile")
class StaticProfile(Eviction):
    """Keeps the hottest experts of the prompt."""

    is_fixed: ClassVar[bool] = True
    default_miss: ClassVar[str] = "host"

    def preload(self) -> Keys:
        """Return experts by falling count; the cache takes what each group has room for."""
        count = self.view.prompt_counts()
        return np.argsort(-count, kind="stable")[: np.count_nonzero(count)]
