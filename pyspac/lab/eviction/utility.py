"""Utility: the shipping estimators (`pyspac.scheduler.estimator`) say how much an expert is worth.

The least utility leaves, ties by oldest use (MoE-SpAc 3.4). Where the prefetch policy is `utility` as
well, the engine's rules hold: only residents below tau leave, and only for a newcomer of higher utility.
Knobs: those of `SchedulerConfig`; -1 is the shipping default (`gamma`: the run's draft length; `budget`:
bytes per forward, 0 for no limit). Others measure what pyspac does otherwise than MoE-SpAc, the last one what
peers do:

- `reset`: a resident that was used is worth nothing (its Appendix D), 1: until the next decision, 2: until it
  is copied again. 0: it keeps its utility.
- `cold_on_host` = 1: residents below tau are computed on the host. 0: wherever they are.
- `free_slots` = 0: tau is not lowered to fill empty slots.
- `second_use`: an expert used only once within so many tokens is not planned for. 0: any may come.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from pyspac.lab.demand import Bools, Floats, Keys
from pyspac.lab.events import Access, Loaded, StepOver
from pyspac.lab.policy import Eviction
from pyspac.lab.registry import register
from pyspac.lab.shipping import SchedulerSetup
from pyspac.scheduler.config import SchedulerConfig
from pyspac.scheduler.estimator import REGISTRY

SHIPPED = -1.0
_WHOLE = ("n_levels", "threshold", "static_steps", "gamma", "budget")
KNOBS: dict[str, float] = {
    name: int(SHIPPED) if name in _WHOLE else SHIPPED
    for name in (
        "n_levels", "ema_decay", "payback_steps", "budget_share", "threshold", "static_steps", "forgetting",
        "gamma", "budget",
    )
}  # fmt: skip
DEPARTURES: dict[str, float] = {"reset": 0, "cold_on_host": 0, "free_slots": 1, "second_use": 0.0}
_UNTIL_COPIED = 2


class UtilityEviction(Eviction):
    """Evicts the least utility; `estimator` names the shipping one."""

    estimator: ClassVar[str]
    knobs: ClassVar[dict[str, float]] = {**KNOBS, **DEPARTURES}
    limits: ClassVar[dict[str, tuple[float, float]]] = {
        "reset": (0, 2), "cold_on_host": (0, 1), "free_slots": (0, 1), "second_use": (0, 1e9),
    }  # fmt: skip
    default_prefetch: ClassVar[str] = "utility"
    default_miss: ClassVar[str] = "host"

    def start(self) -> None:
        """No resident is spent; none was used."""
        self.is_spent = np.zeros(self.view.n_cell, bool)
        self.is_shut_out = np.full(self.view.n_cell, bool(self.knob["second_use"]))
        self.last_use = np.full(self.view.n_cell, -np.inf)  # [n_cell] tokens decoded until then
        self.n_decoded = 0

    def scheduler_setup(self) -> SchedulerSetup:
        """Return the shipping scheduler's settings with this estimator and these knobs."""
        fields: dict[str, Any] = {name: self.knob[name] for name in KNOBS if self.knob[name] != SHIPPED}
        fields |= {name: int(fields[name]) for name in _WHOLE if name in fields}
        fields["n_draft_max"] = fields.pop("gamma", self.view.k)
        if "budget" in fields:
            fields["byte_budget"] = fields.pop("budget") or None
        config = SchedulerConfig(estimator=self.estimator, **fields)
        return SchedulerSetup(config, bool(self.knob["free_slots"]), self.is_spent, self.is_shut_out)

    def needs_host(self) -> bool:
        """Whether cold residents are left to it."""
        return bool(self.knob["cold_on_host"])

    def _worth(self) -> npt.NDArray[np.uint8]:
        """Return [n_cell] the utilities as the evictor sees them."""
        utility = self.view.decision.utility
        return np.where(self.is_spent, np.uint8(0), utility) if self.knob["reset"] else utility

    def rank(self, candidates: Keys) -> Floats:
        """Return utility first, then last use."""
        last_used = self.view.cache.last_used[candidates]
        return np.asarray(self._worth()[candidates] * 2.0**40 + last_used)

    def may_leave(self, candidates: Keys, newcomer: int | None) -> Bools | None:
        """Apply the engine's rules where the engine's plan is carried out."""
        decision = self.view.decision
        if not decision.is_obeyed:
            return None
        worth = self._worth()[candidates]
        below = worth < decision.tau[self.view.layer_of[candidates]]
        return np.asarray(below if newcomer is None else below & (worth < decision.utility[newcomer]))

    def runs_on_device(self, keys: Keys) -> Bools | None:
        """Leave cold residents to the host, if asked to."""
        if not self.knob["cold_on_host"]:
            return None
        return self.view.decision.is_hot(keys, self.view.layer_of[keys])

    def on_access(self, access: Access) -> None:
        """Note who is spent, and who was used before; while its layer runs an expert is pinned."""
        keys = access.demand.keys
        if self.knob["reset"]:
            self.is_spent[keys] = True
        if self.knob["second_use"]:
            is_again = self.n_decoded - self.last_use[keys] <= self.knob["second_use"]
            self.is_shut_out[keys] = ~(is_again | (access.demand.rows > 1))
            self.last_use[keys] = self.n_decoded

    def on_loaded(self, event: Loaded) -> None:
        """A fresh copy is worth its utility."""
        self.is_spent[event.key] = False

    def on_step_over(self, event: StepOver) -> None:
        """The scheduler has made a new decision."""
        self.n_decoded += event.n_emitted
        if self.knob["second_use"]:
            self.is_shut_out |= self.n_decoded - self.last_use > self.knob["second_use"]
        if self.knob["reset"] and self.knob["reset"] != _UNTIL_COPIED:
            self.is_spent[:] = False

    @classmethod
    def about(cls) -> str:
        """Return what the estimator says of itself."""
        text = (REGISTRY[cls.estimator].__doc__ or "").split("\n\n")[0]
        return f"Utility by the shipping estimator {cls.estimator}: {text}"


@register("ema")
class Ema(UtilityEviction):
    """What pyspac ships."""

    estimator = "ema"


@register("spac")
class Spac(UtilityEviction):
    """Algorithm 1 of MoE-SpAc."""

    estimator = "spac"


@register("last")
class Last(UtilityEviction):
    """The last step's counts."""

    estimator = "last"


@register("utility-lru")
class UtilityLru(UtilityEviction):
    """Recency in levels."""

    estimator = "lru"


@register("utility-lfu")
class UtilityLfu(UtilityEviction):
    """Share of all tokens so far."""

    estimator = "lfu"


@register("utility-static")
class UtilityStatic(UtilityEviction):
    """A share that is learned at the start and kept."""

    estimator = "static"
