"""One step of the scheduler: drain, estimate, balance, plan, submit; and between steps, a look ahead.

Runs once per decoding step (one draft and verify cycle, or one token), in the process of the engine or in
another: it only reads and writes a board.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np
from numpy.typing import NDArray

from pyspac.engine.board import NO_BUDGET, Board
from pyspac.engine.layout_groups import LayoutGroups
from pyspac.scheduler.activations import ActivationDrain, Activity
from pyspac.scheduler.balancer import Balancer
from pyspac.scheduler.config import SchedulerConfig
from pyspac.scheduler.cost_model import CostModel
from pyspac.scheduler.estimator import make_estimator
from pyspac.scheduler.fallback import Fallback, PlacementMode
from pyspac.scheduler.foresight import make_foresight
from pyspac.scheduler.layer_modes import LayerModes
from pyspac.scheduler.occupancy import Occupancy
from pyspac.scheduler.plan_ahead import AheadPlanner, Decided
from pyspac.scheduler.prefetch import EMPTY_PLAN, Prefetcher, PrefetchPlan


class StepTimes:
    """The scheduler's own cost: a ring of the last steps' durations in microseconds."""

    def __init__(self, n_kept: int = 1024) -> None:
        """Keep the last n_kept steps."""
        self._us = np.zeros(n_kept)
        self.n_steps = 0

    def add(self, us: float) -> None:
        """Take in one step."""
        self._us[self.n_steps % len(self._us)] = us
        self.n_steps += 1

    def percentile_us(self, percent: float) -> float:
        """Return a percentile over the kept steps; nan if there is none."""
        n = min(self.n_steps, len(self._us))
        return float(np.percentile(self._us[:n], percent)) if n else float("nan")


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """The scheduler's own numbers, for reports."""

    n_steps: int
    n_loads_planned: int
    step_p50_us: float
    step_p99_us: float


class StaticAllocation:
    """The ablation `prefetch`: after one step, the pool's slots are dealt out once and for all.

    Every layer gets an equal share of its layout group's slots, filled with its most useful experts (the
    first ones, where utilities are equal). As levels: 1 for those, 0 for the rest, and tau = 1.
    """

    def __init__(self, board: Board) -> None:
        """Deal out nothing yet."""
        self.groups = LayoutGroups(board)
        self.utility = np.zeros((board.n_layer, board.n_expert), np.uint8)
        self.tau = np.ones(board.n_layer, np.uint8)
        self.is_dealt = False

    def deal(self, utility: NDArray[np.uint8]) -> None:
        """Fix the allocation by these utilities; later calls change nothing."""
        if self.is_dealt:
            return
        order = np.argsort(-utility.astype(np.int16), axis=1, kind="stable")
        for n_group_slots, index in zip(self.groups.slots.tolist(), self.groups.layers, strict=True):
            layers = np.arange(len(self.tau))[index]
            for rank, il in enumerate(layers):
                n_slots, rest = divmod(n_group_slots, len(layers))
                self.utility[il, order[il, : n_slots + (rank < rest)]] = 1
        self.is_dealt = True


class Scheduler:
    """Decides, once per step, which experts belong on the device and what to copy."""

    def __init__(self, board: Board, config: SchedulerConfig | None = None) -> None:
        """Allocate everything for the board's geometry; nothing is decided before the first step()."""
        self.board = board
        self.config = config or SchedulerConfig()
        self.activations = ActivationDrain(board)
        self.estimator = make_estimator(board.n_layer, board.n_expert, self.config)
        self.cost = CostModel(board, link_gb_s=self.config.link_gb_s)
        self.slots = Occupancy(board)
        self.balancer = Balancer(board, self.config, self.cost)
        self.prefetcher = Prefetcher(board, self.config)
        self.layers = LayerModes(board, self.cost, self.balancer.tables, is_on=self.config.has_whole_layers)
        self.static = StaticAllocation(board) if "prefetch" in self.config.without else None
        self.foresight = make_foresight(board, self.config.predict)  # None: no look-ahead
        self.ahead = AheadPlanner(self.prefetcher, self.config, self.cost)
        self.fallback = Fallback() if self.config.has_fallback else None  # None: copies go on
        self.times = StepTimes()
        self.activity = self.activations.drain()  # of the last step; nothing yet
        self.last_plan = EMPTY_PLAN
        self._n_loads_planned = 0
        self._budgets: list[int | None] = [None] * board.n_device

    def step(self) -> PrefetchPlan:
        """Drain, estimate, balance, plan, submit. Draft limits are another's: see pyspac.speculation."""
        start = perf_counter_ns()
        is_steady = not self._look_at_layers()
        activity = self.activity = self.activations.drain()
        self.cost.update(activity, self.layers.after)
        if activity.prompt_tokens.any() and "prompt" not in self.config.without:
            self.estimator.learn_prompt(activity.prompt_counts, activity.prompt_tokens)
        if activity.n_tokens > 0:
            self._learn(activity)
        utility, tau = self._decide()
        way = self._choose_mode(activity, is_steady)
        is_idle = way == "frozen" or (way == "whole" and self.layers.is_in_place(way))
        self._budgets = [0 if is_idle else self._byte_budget(i) for i in range(self.board.n_device)]
        is_still = way in ("frozen", "whole") or not self.config.is_scheduled
        plan = self.last_plan = EMPTY_PLAN if is_still else self._plan(utility, tau, activity)
        self._submit(utility, tau, plan)
        if self.foresight is not None:
            self.foresight.learn(activity.counts, self.slots)
        self.times.add((perf_counter_ns() - start) / 1e3)
        return plan

    def look_ahead(self, tokens: Sequence[int]) -> None:
        """Say which tokens the next forward computes, as far as they are known; plan anew if that helps.

        To be called after `step`, any number of times before the next one: with the sampled token before
        drafting, then with the drafts too. Does nothing without a predictor.
        """
        if self.foresight is None:
            return
        self.foresight.see(tokens)
        if self.foresight.chance is None:  # of tokens that nothing is known about
            return
        utility, tau = self.estimator.utility, self.balancer.tau
        decided = Decided(
            utility=utility, tau=tau, counts=self.activity.counts,
            worth=self.balancer.tables.use_probability(), byte_limits=self._budgets,
        )  # fmt: skip
        # until the forward begins: a single token is told before drafting, which took so long on average (0
        # where nothing drafts); with drafts beside it, the forward is next
        lead_us = self.cost.draft_us if len(tokens) == 1 else 0.0
        plan, levels = self.ahead.plan(
            decided, self.slots.read(self.board.residency), self.foresight.chance, lead_us
        )
        self.foresight.note_plan(plan)
        self._submit(levels, tau, plan)

    def _decide(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Return utility and tau: from estimator and balancer, or from the static allocation."""
        utility = self.estimator.utility
        tau = self.balancer.solve(utility, self.slots.read(self.board.residency))
        if self.static is None:
            return utility, tau
        if utility.any():
            self.static.deal(utility)
        return self.static.utility, self.static.tau

    def _look_at_layers(self) -> bool:
        """Leave whole layers, and those that become so, to the device; return whether that has changed."""
        if not self.layers.look():
            return False
        is_aside = ~self.layers.is_split
        self.balancer.set_aside(is_aside)
        self.prefetcher.groups.set_aside(is_aside)
        self.slots.groups.set_aside(is_aside)
        return True

    def _learn(self, activity: Activity) -> None:
        """Let balancer and estimator take in a step; whole layers are not counted."""
        if self.layers.n_whole == 0:
            self.balancer.observe(activity.counts)
            self.estimator.update(activity.counts, activity.n_tokens)
            return
        self.balancer.observe(activity.counts, self.layers.is_whole)
        self.estimator.update_but(activity.counts, activity.n_tokens, self.layers.is_whole)

    def _choose_mode(self, activity: Activity, is_steady: bool) -> PlacementMode:
        """Tell fallback and layers what the steps took, and ask how the next one goes."""
        is_full = bool(self.slots.n_free.max() <= 0)
        way: PlacementMode = "copies" if self.fallback is None else self.fallback.way
        self.layers.observe(activity, way=way, is_steady=is_steady, is_full=is_full)
        if self.fallback is None:
            return way
        self.fallback.observe(
            activity.steps,
            n_forward=activity.counter("n_forward"),
            loaded_bytes=activity.counter("loaded_bytes"),
            is_full=is_full,
            can_be_whole=self.layers.can_be_only_whole(is_chosen=self.fallback.chosen == "whole"),
            has_whole=self.layers.has_wanted,
            is_in_place=self.layers.is_in_place(way),
        )
        self.board.fallback[:] = self.fallback.to_row()
        return self.fallback.way

    def _byte_budget(self, device: int) -> int | None:
        if self.config.byte_budget == "auto":
            return self.cost.step_budget_bytes(self.config.budget_share, device)
        return self.config.byte_budget

    def _plan(self, utility: NDArray[np.uint8], tau: NDArray[np.uint8], activity: Activity) -> PrefetchPlan:
        worth = self.balancer.tables.use_probability()
        return self.prefetcher.plan(utility, tau, self.slots, activity.counts, worth, self._budgets)

    def _submit(self, utility: NDArray[np.uint8], tau: NDArray[np.uint8], plan: PrefetchPlan) -> None:
        """Write the decision to the board."""
        board = self.board
        with board.decision():
            board.utility[:] = utility
            board.tau[:] = tau
            board.load[: plan.n_load] = plan.load
            board.n_load[0] = plan.n_load
            for device, budget in enumerate(self._budgets):
                board.byte_budget[device] = NO_BUDGET if budget is None else budget
            board.want_whole[:] = self.layers.wanted_in(self.fallback.way if self.fallback else "copies")
        self._n_loads_planned += plan.n_load

    def stats(self) -> SchedulerStats:
        """Return the scheduler's own numbers so far."""
        return SchedulerStats(
            n_steps=self.times.n_steps,
            n_loads_planned=self._n_loads_planned,
            step_p50_us=self.times.percentile_us(50),
            step_p99_us=self.times.percentile_us(99),
        )
