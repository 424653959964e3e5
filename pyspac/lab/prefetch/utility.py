"""Utility with tau: the shipping scheduler plans between steps what to copy (moe-spac.txt 3.3 and 3.4).

The plan goes into the engine's queue, one level per utility; tau, byte budget and payback are the
scheduler's own. With an eviction policy other than an estimator's, the plan is made with the default
estimator. No knob here.
"""

from __future__ import annotations

from typing import ClassVar

from pyspac.lab.policy import Prefetch, register
from pyspac.lab.shipping import ShippingScheduler
from pyspac.scheduler.config import SchedulerConfig


@register("prefetch", "utility")
class UtilityPrefetch(Prefetch):
    """Carries out the shipping scheduler's plan after every step."""

    expires: ClassVar[bool] = False

    def start(self) -> None:
        """Share the eviction policy's scheduler, or make one."""
        if self.run.shipping is None:
            config = SchedulerConfig(n_draft_max=self.run.k, without=self.run.setup.without)
            self.run.shipping = ShippingScheduler(self.run, config)
        self.shipping = self.run.shipping
        self.shipping.is_engine = True

    def end_step(self) -> None:
        """Decide and submit."""
        self.shipping.step()
        self.shipping.apply()
