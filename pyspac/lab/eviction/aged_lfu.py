"""LFU that ages: utility by the share of tokens that used the expert, all counts halved from time to time.

Between the shipping `lfu`, which forgets nothing, and `ema`, which forgets with every token. Knobs: those of
the other utility policies, and `half_every`, tokens.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import ClassVar

from pyspac.lab.eviction.utility import UtilityEviction
from pyspac.lab.registry import register
from pyspac.lab.shipping import SchedulerSetup
from pyspac.scheduler.config import SchedulerConfig
from pyspac.scheduler.estimator import Counts, Levels, LfuEstimator


class AgedLfuEstimator(LfuEstimator):
    """As LFU; every `half_every` tokens what was counted so far counts for half."""

    def __init__(self, n_layer: int, n_expert: int, config: SchedulerConfig, *, half_every: float) -> None:
        """Count nothing yet."""
        super().__init__(n_layer, n_expert, config)
        self.half_every = half_every
        self._n_new = 0

    def update(self, counts: Counts, n_tokens: int) -> Levels:
        """Halve what is due, then add."""
        self._n_new += n_tokens
        while self._n_new >= self.half_every:
            self._n_new -= int(self.half_every)
            self._sum *= 0.5
            self._n_tokens *= 0.5
        return super().update(counts, n_tokens)


@register("aged-lfu")
class AgedLfu(UtilityEviction):
    """Shares with a half-life."""

    estimator = "lfu"
    knobs: ClassVar[dict[str, float]] = {**UtilityEviction.knobs, "half_every": 64.0}
    limits: ClassVar[dict[str, tuple[float, float]]] = {**UtilityEviction.limits, "half_every": (1, 1e9)}

    def scheduler_setup(self) -> SchedulerSetup:
        """Have the scheduler estimate like this."""
        make = partial(AgedLfuEstimator, half_every=max(self.knob["half_every"], 1.0))
        return replace(super().scheduler_setup(), make_estimator=make)

    @classmethod
    def about(cls) -> str:
        """Return the idea."""
        return "Utility by LFU whose counts are halved every half_every tokens."
