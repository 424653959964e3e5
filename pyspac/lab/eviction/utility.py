"""Utility: the shipping estimators (`pyspac.estimator`) say how much an expert is worth.

The least utility leaves, ties by oldest use (moe-spac.txt 3.4). Where the prefetch policy is `utility` as
well, the engine's rules hold: only residents below tau leave, and only for a newcomer of higher utility.
Knobs: those of `SchedulerConfig`; -1 is the shipping default.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from pyspac.config import SchedulerConfig
from pyspac.estimator import REGISTRY
from pyspac.lab.policy import Bools, Eviction, Floats, Keys, register
from pyspac.lab.shipping import ShippingScheduler

SHIPPED = -1.0
KNOBS = dict.fromkeys(
    ("n_levels", "ema_decay", "payback_steps", "budget_share", "threshold", "static_steps", "forgetting"),
    SHIPPED,
)
_WHOLE = ("n_levels", "threshold", "static_steps")


class UtilityEviction(Eviction):
    """Evicts the least utility; `estimator` names the shipping one."""

    estimator: ClassVar[str] = "ema"
    knobs: ClassVar[dict[str, float]] = {**KNOBS, "budget": SHIPPED}

    def start(self) -> None:
        """Start the shipping scheduler with this estimator."""
        super().start()
        given = {name: getattr(self, name) for name in KNOBS if getattr(self, name) != SHIPPED}
        fields: dict[str, Any] = {
            name: int(value) if name in _WHOLE else value for name, value in given.items()
        }
        budget = getattr(self, "budget")  # noqa: B009  0: no limit of bytes per forward
        config = SchedulerConfig(
            estimator=self.estimator,
            n_draft_max=self.run.k,
            without=self.run.setup.without,
            byte_budget="auto" if budget == SHIPPED else int(budget) or None,
            **fields,
        )
        self.shipping = self.run.shipping = ShippingScheduler(self.run, config)

    def rank(self, candidates: Keys) -> Floats:
        """Return utility first, then last use."""
        cache = self.run.cache
        return np.asarray(self.shipping.utility[candidates] * 2.0**40 + cache.last_used[candidates])

    def may_leave(self, candidates: Keys, newcomer: int) -> Bools | None:
        """Apply the engine's rules where the engine's plan is carried out."""
        if not self.shipping.is_engine:
            return None
        utility = self.shipping.utility
        below = utility[candidates] < self.shipping.tau[self.run.layer_of[candidates]]
        return np.asarray(below & (utility[candidates] < utility[newcomer]))

    def end_step(self) -> None:
        """Let the estimator see the step."""
        self.shipping.step()


def _add(name: str, estimator: str) -> None:
    about = (REGISTRY[estimator].__doc__ or "").split("\n\n")[0]
    fields = {"estimator": estimator, "__doc__": f"Utility by the shipping estimator {estimator}: {about}"}
    register("eviction", name)(type(f"Utility_{estimator}", (UtilityEviction,), fields))


for _name, _estimator in (("ema", "ema"), ("spac", "spac"), ("last", "last"), ("utility-lru", "lru"),
                          ("utility-lfu", "lfu"), ("utility-static", "static")):  # fmt: skip
    _add(_name, _estimator)
