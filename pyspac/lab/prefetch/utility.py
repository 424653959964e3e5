"""Utility with tau: the shipping scheduler plans between steps what to copy (MoE-SpAc 3.3 and 3.4).

The plan goes into the engine's queue, one level per utility; tau, byte budget and payback are the
scheduler's own. With an eviction policy other than an estimator's, the plan is made with the default
estimator. Knob: `quiet` = 1 begins no copy while the host computes experts.
"""

from __future__ import annotations

from typing import ClassVar

from pyspac.lab.policy import Prefetch
from pyspac.lab.registry import register


@register("utility")
class UtilityPrefetch(Prefetch):
    """Has the shipping scheduler's plan carried out after every step."""

    expires: ClassVar[bool] = False
    obeys_scheduler: ClassVar[bool] = True
    knobs: ClassVar[dict[str, float]] = {"quiet": 0}
    limits: ClassVar[dict[str, tuple[float, float]]] = {"quiet": (0, 1)}

    def waits_for_host(self) -> bool:
        """If asked to."""
        return bool(self.knob["quiet"])
