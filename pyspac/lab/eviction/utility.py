"""Utility: the shipping estimators (`pyspac.scheduler.estimator`) say how much an expert is worth.

The least utility leaves, ties by oldest use (moe-spac.txt 3.4). Where the prefetch policy is `utility` as
well, the engine's rules hold: only residents below tau leave, and only for a newcomer of higher utility.
Knobs: those of `SchedulerConfig`; -1 is the shipping default (`gamma`: the run's draft length; `budget`:
bytes per forward, 0 for no limit). Three more measure what pyspac does otherwise than moe-spac.txt:

- `reset`: a resident that was used is worth nothing (its Appendix D), 1: until the next decision, 2: until it
  is copied again. 0: it keeps its utility.
- `cold_on_host` = 1: residents below tau are computed on the host. 0: wherever they are.
- `free_slots` = 0: tau is not lowered to fill slots that nobody holds.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from pyspac.errors import ConfigError
from pyspac.lab.policy import Bools, Demand, Eviction, Floats, Keys, parse, register
from pyspac.lab.shipping import ShippingScheduler
from pyspac.scheduler.config import SchedulerConfig
from pyspac.scheduler.estimator import REGISTRY

SHIPPED = -1.0
KNOBS = dict.fromkeys(
    (
        "n_levels", "ema_decay", "payback_steps", "budget_share", "threshold", "static_steps", "forgetting",
        "gamma", "budget",
    ),
    SHIPPED,
)  # fmt: skip
DEPARTURES = {"reset": 0.0, "cold_on_host": 0.0, "free_slots": 1.0}
_WHOLE = ("n_levels", "threshold", "static_steps", "n_draft_max")
_UNTIL_COPIED = 2


class UtilityEviction(Eviction):
    """Evicts the least utility; `estimator` names the shipping one."""

    estimator: ClassVar[str] = "ema"
    knobs: ClassVar[dict[str, float]] = {**KNOBS, **DEPARTURES}
    reset: float
    cold_on_host: float
    free_slots: float

    def start(self) -> None:
        """Start the shipping scheduler with this estimator."""
        super().start()
        self.shipping = self.run.shipping = ShippingScheduler(self.run, self._config())
        self.shipping.scheduler.balancer.uses_free_slots = bool(self.free_slots)
        self.is_spent = self.shipping.scheduler.is_spent.reshape(-1)  # [n_layer * n_expert]
        if self.cold_on_host and parse(self.run.setup.miss)[0] not in ("auto", "host"):
            raise ConfigError("--miss", self.run.setup.miss, "host, as cold_on_host leaves residents to it")

    def _config(self) -> SchedulerConfig:
        fields: dict[str, Any] = {
            name: getattr(self, name) for name in KNOBS if getattr(self, name) != SHIPPED
        }
        budget = fields.pop("budget", None)
        fields["n_draft_max"] = fields.pop("gamma", self.run.k)
        fields |= {name: int(fields[name]) for name in _WHOLE if name in fields}
        return SchedulerConfig(
            estimator=self.estimator,
            without=self.run.setup.without,
            byte_budget="auto" if budget is None else int(budget) or None,
            **fields,
        )

    @property
    def _worth(self) -> Any:
        """[n_layer * n_expert] uint8, as the evictor sees it."""
        utility = self.shipping.utility
        return np.where(self.is_spent, 0, utility) if self.reset else utility

    def rank(self, candidates: Keys) -> Floats:
        """Return utility first, then last use."""
        cache = self.run.cache
        return np.asarray(self._worth[candidates] * 2.0**40 + cache.last_used[candidates])

    def may_leave(self, candidates: Keys, newcomer: int) -> Bools | None:
        """Apply the engine's rules where the engine's plan is carried out."""
        if not self.shipping.is_engine:
            return None
        worth = self._worth[candidates]
        below = worth < self.shipping.tau[self.run.layer_of[candidates]]
        return np.asarray(below & (worth < self.shipping.utility[newcomer]))

    def runs_on_device(self, keys: Keys) -> Bools | None:
        """Leave cold residents to the host, if asked to."""
        if not self.cold_on_host:
            return None
        return np.asarray(self.shipping.utility[keys] >= self.shipping.tau[self.run.layer_of[keys]])

    def use(self, demand: Demand, is_hit: Bools) -> None:
        """Note who is spent; while its layer runs an expert is pinned."""
        if self.reset:
            self.is_spent[demand.keys] = True

    def loaded(self, key: int) -> None:
        """A fresh copy is worth its utility."""
        self.is_spent[key] = False

    def end_step(self) -> None:
        """Let the estimator see the step."""
        self.shipping.step()
        if self.reset and self.reset != _UNTIL_COPIED:
            self.is_spent[:] = False


def _add(name: str, estimator: str) -> None:
    about = (REGISTRY[estimator].__doc__ or "").split("\n\n")[0]
    fields = {"estimator": estimator, "__doc__": f"Utility by the shipping estimator {estimator}: {about}"}
    register("eviction", name)(type(f"Utility_{estimator}", (UtilityEviction,), fields))


for _name, _estimator in (("ema", "ema"), ("spac", "spac"), ("last", "last"), ("utility-lru", "lru"),
                          ("utility-lfu", "lfu"), ("utility-static", "static")):  # fmt: skip
    _add(_name, _estimator)
