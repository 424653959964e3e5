"""Step 4 with a look-ahead: the plan, with what the next forward is expected to use.

An expert's value is the uses that it is expected to have per step, over the steps within which a copy has to
pay (H = payback_steps): the chance at its level in each of them, but in the first one the predicted chance.

    value = (chance + (H - 1) * worth[level]) / H        predicted, and likelier than its level says
    value = worth[level]                                 all others

A copy only for the next step moves the same bytes over the host's memory bus as the use that it saves, so
a prediction tips the scales and no more: a newcomer takes the place of the least valuable resident where the
uses it gains within H steps exceed the price of a copy (`CostModel.copy_prices`). What is predicted and
resident is no victim. What would come after its layer has begun is not copied for this step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pyspac.scheduler.config import SchedulerConfig
from pyspac.scheduler.cost_model import CostModel
from pyspac.scheduler.occupancy import Occupancy
from pyspac.scheduler.prefetch import Prefetcher, PrefetchPlan

Flat = NDArray[np.intp]  # [n] il * n_expert + ie
_FREE, _NOBODY = -1, -2  # instead of a victim


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """What a step decided, before the look-ahead."""

    utility: NDArray[np.uint8]  # [n_layer, n_expert]
    tau: NDArray[np.uint8]  # [n_layer]
    counts: NDArray[np.uint32]  # [n_layer, n_expert] of the last step
    worth: NDArray[np.float64]  # [n_levels + 1] by level, never falling: chance of use in a step
    byte_limits: Sequence[int | None]  # [n_device] copies may take so much per step; None: no limit


class AheadPlanner:
    """Makes plans as a Prefetcher does, and the levels that carry them out."""

    def __init__(self, prefetcher: Prefetcher, config: SchedulerConfig, cost: CostModel) -> None:
        """Plan with that prefetcher's slots and budgets."""
        self.base = prefetcher
        self.cost = cost
        self.n_steps = config.effective_payback_steps or config.memory_tokens  # [H]
        self._first_level = min(config.effective_levels + 1, 255)  # of what the next forward needs

    def plan(
        self, decided: Decided, slots: Occupancy, chance: NDArray[np.float32], lead_us: float
    ) -> tuple[PrefetchPlan, NDArray[np.uint8]]:
        """Return what to copy, and utilities [n_layer, n_expert] by which the engine keeps and orders it.

        chance: [n_layer, n_expert] of use in the next forward, 0: nothing is known; lead_us: until it begins.
        """
        rate = decided.worth[decided.utility]
        is_split = self.base.groups.is_split[:, None]
        is_named = chance > 0
        is_seen = (chance > rate) & is_split
        is_hot = (decided.utility >= decided.tau[:, None]) & is_split
        value = np.where(is_seen, rate + (chance - rate) / self.n_steps, rate)
        wanted = self._in_order(np.flatnonzero((is_hot | is_seen) & ~slots.is_held), value, is_seen, decided)
        is_victim = slots.is_resident & ~is_named & self.base.can_evict
        victim_of = self._pairs(wanted, is_victim, slots.n_free, value, is_hot.ravel())
        pays, pays_anyway = self._paying(wanted, victim_of, is_seen.ravel(), is_hot.ravel(), value, rate)
        is_ahead = pays & ~pays_anyway
        is_late = is_ahead & self._too_late(wanted, pays, slots.under_way_bytes, lead_us)
        goes = np.flatnonzero(pays & ~is_late)
        goes = goes[self.base.within_budget(wanted[goes], decided.byte_limits, slots.under_way_bytes)]
        load = wanted[goes]
        plan = PrefetchPlan(
            load.astype(np.uint32),
            ahead=load[is_ahead[goes]].astype(np.uint32),
            n_refused=int(np.count_nonzero(is_seen.ravel()[wanted] & ~pays)),
            n_late=int(np.count_nonzero(is_late)),
        )  # fmt: skip
        leaves = victim_of[goes]
        levels = self._levels(decided, is_named & slots.is_held, leaves[leaves >= 0])
        levels.reshape(-1)[load[is_seen.ravel()[load]]] = self._first_level
        return plan, levels

    def _in_order(
        self, wanted: Flat, value: NDArray[np.float64], is_seen: NDArray[np.bool_], decided: Decided
    ) -> Flat:
        """Sort: what the next forward needs comes first, then by value, then by activations."""
        keys = (
            -decided.counts.ravel()[wanted].astype(np.int64),
            -value.ravel()[wanted],
            ~is_seen.ravel()[wanted],
        )
        return wanted[np.lexsort(keys)]  # the last key comes first

    def _pairs(
        self,
        wanted: Flat,
        is_victim: NDArray[np.bool_],
        n_free: NDArray[np.int64],
        value: NDArray[np.float64],
        is_hot: NDArray[np.bool_],
    ) -> Flat:
        """Return of `wanted` whose slot each would get: _FREE, or a victim's; _NOBODY where none is left.

        Free slots go to the most valuable; the next newcomer meets the least valuable victim, and so on:
        first those that any newcomer may drive out, then hot ones, whom only what is predicted may.
        """
        flat = value.ravel()
        victims = np.flatnonzero(is_victim)
        victims = victims[np.lexsort((flat[victims], is_hot[victims]))]  # the last key comes first
        order = np.argsort(-flat[wanted], kind="stable")
        victim_of = np.full(len(wanted), _NOBODY)
        of_layer = self.base.groups.of_layer
        for g in range(self.base.groups.n_group):
            mine = order[of_layer[wanted[order] // self.base.n_expert] == g]
            theirs = victims[of_layer[victims // self.base.n_expert] == g]
            n = max(int(n_free[g]), 0)
            victim_of[mine[:n]] = _FREE
            n_swap = min(len(mine[n:]), len(theirs))
            victim_of[mine[n : n + n_swap]] = theirs[:n_swap]
        return victim_of

    def _paying(
        self,
        wanted: Flat,
        victim_of: Flat,
        is_seen: NDArray[np.bool_],
        is_hot: NDArray[np.bool_],
        value: NDArray[np.float64],
        rate: NDArray[np.float64],
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return of `wanted` whose copy pays, and whose would without the prediction."""
        is_swap = victim_of >= 0
        victim = np.where(is_swap, victim_of, 0)
        is_hot_victim = is_swap & is_hot[victim]
        price = self.cost.copy_prices()[self.base.groups.device_of_layer[wanted // self.base.n_expert]]
        margin = np.where(is_seen[wanted], price / self.n_steps, self.base.margin)
        gain = value.ravel()[wanted] - value.ravel()[victim]
        pays = is_swap & (gain > 0) & (gain >= margin) & (is_seen[wanted] | ~is_hot_victim)
        gain = rate.ravel()[wanted] - value.ravel()[victim]
        pays_anyway = is_swap & (gain > 0) & (gain >= self.base.margin) & ~is_hot_victim
        is_free = victim_of == _FREE
        return pays | is_free, (pays_anyway | is_free) & is_hot[wanted]

    def _too_late(
        self, wanted: Flat, pays: NDArray[np.bool_], under_way_bytes: Sequence[int], lead_us: float
    ) -> NDArray[np.bool_]:
        """Return of `wanted`, in order, whose copy would not be there when its layer begins."""
        layer = wanted // self.base.n_expert
        device, n_bytes = self.base.groups.device_of_layer[layer], self.base.bytes[layer] * pays
        is_late = np.zeros(len(wanted), bool)
        for index, under_way in enumerate(under_way_bytes):
            link = self.cost.link_us_per_byte(index)
            if link is None or self.cost.step_us <= 0.0:
                continue
            mine = np.flatnonzero(device == index)
            done_us = link * (under_way + np.cumsum(n_bytes[mine]))
            is_late[mine] = done_us > lead_us + self.cost.layer_starts_us()[layer[mine]]
        return is_late

    def _levels(self, decided: Decided, kept: NDArray[np.bool_], leaves: Flat) -> NDArray[np.uint8]:
        """Return utilities by which the engine keeps what is predicted and held, and lets the victims go."""
        levels = decided.utility.copy()
        np.maximum(levels, decided.tau[:, None], out=levels, where=kept)
        below = decided.tau[leaves // self.base.n_expert] - 1
        levels.reshape(-1)[leaves] = np.minimum(levels.ravel()[leaves], below)
        return levels
