"""The shipping scheduler inside the lab: a board that the lab fills, and the engine's way to obey it.

Estimator, balancer and prefetcher are `pyspac.Scheduler` itself. What it learns from (activation
counts, residency, copy times, layer times) is written to a `LocalBoard` as the engine would, with predicted
times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyspac.engine.board import BoardGeometry, LocalBoard, Residency
from pyspac.engine.step import StepRecord
from pyspac.lab.demand import Bools, Demand, Tokens
from pyspac.lab.events import StepOver
from pyspac.lab.predict.recorded import RECORDED
from pyspac.lab.state import RunState
from pyspac.scheduler.activations import Activity
from pyspac.scheduler.config import SchedulerConfig
from pyspac.scheduler.estimator import Estimator
from pyspac.scheduler.prefetch import PrefetchPlan
from pyspac.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class SchedulerSetup:
    """How a policy wants the scheduler."""

    config: SchedulerConfig
    uses_free_slots: bool = True  # the balancer lowers tau to fill empty slots
    is_spent: Bools | None = None  # [n_cell] residents without worth to the plan; the policy's array
    is_shut_out: Bools | None = None  # [n_cell] who may not come; the policy's array
    make_estimator: Callable[[int, int, SchedulerConfig], Estimator] | None = None  # None: the config's


class LabScheduler(Scheduler):
    """The shipping scheduler; its plan may count on residents that are spent (MoE-SpAc, Appendix D)."""

    def __init__(self, board: LocalBoard, setup: SchedulerSetup) -> None:
        """Make a scheduler; `is_spent` is read at every step."""
        super().__init__(board, setup.config)
        self.fallback = (
            None  # policies are compared as they are, and the replay's clock has no other programs
        )
        self.balancer.uses_free_slots = setup.uses_free_slots
        shape = (board.n_layer, board.n_expert)
        self.is_spent = np.zeros(shape, bool) if setup.is_spent is None else setup.is_spent.reshape(shape)
        self.is_shut_out = (
            np.zeros(shape, bool) if setup.is_shut_out is None else setup.is_shut_out.reshape(shape)
        )
        if setup.make_estimator is not None:
            self.estimator = setup.make_estimator(*shape, setup.config)

    def _plan(self, utility: NDArray[np.uint8], tau: NDArray[np.uint8], activity: Activity) -> PrefetchPlan:
        """Plan as if spent residents had utility 0, and who is shut out: newcomers may take their slots."""
        is_there = self.slots.is_resident
        worthless = (self.is_spent & is_there) | (self.is_shut_out & ~is_there)
        return super()._plan(np.where(worthless, 0, utility), tau, activity)


class ShippingScheduler:
    """The scheduler of a run: told of every step, it leaves its decision in the run's state."""

    def __init__(self, state: RunState, setup: SchedulerSetup) -> None:
        """Make a board of the run's geometry that shares the cache's residency."""
        self.cache, self.link, self.books = state.cache, state.link, state.books
        self.decision = state.decision
        g = state.geometry
        slots = [state.group_slots[i] if size else 0 for i, size in zip(g.group, g.expert_bytes, strict=True)]
        self.board = LocalBoard(
            BoardGeometry(
                n_layer=g.n_layer, n_expert=g.n_expert, n_expert_used=g.n_expert_used,
                expert_bytes=g.expert_bytes, group=g.group,
                group_slots=slots,
                max_batch=state.workload.k + 1,
            )
        )  # fmt: skip
        vars(self.board)["residency"] = self.cache.residency.reshape(g.n_layer, g.n_expert)  # the cache's own
        self.scheduler = LabScheduler(self.board, setup)
        self.cache.can_evict = "evict" not in setup.config.without
        self._before = (0.0, 0.0)  # bytes, microseconds on the link
        self.trace = state.trace
        if self.scheduler.foresight is not None and self.trace.token_id is None:
            raise self.trace.without("token ids", "")

    def look_ahead(self, tokens: Tokens, now_us: float) -> None:
        """Tell the scheduler which tokens of the trace come next, as a server does."""
        if self.scheduler.foresight is None:
            return
        assert self.trace.token_id is not None
        self.scheduler.look_ahead(self.trace.token_id[tokens].tolist())
        self._take_over()
        if self.decision.is_obeyed:
            self.apply(now_us)

    def predictors(self) -> list[dict[str, Any]]:
        """Return what each predictor said, and what came of it."""
        foresight = self.scheduler.foresight
        return [] if foresight is None else [foresight.to_dict() | {"source": RECORDED}]

    def log_routing(self, tokens: Tokens) -> None:
        """Append to the routing log what these tokens used, as a forward does."""
        if self.trace.token_id is not None:
            experts = self.trace.experts[tokens].astype(np.uint16)  # NOT_RUN is the log's mark for nothing
            self.board.record_routing(self.trace.token_id[tokens], experts)

    def step(self, event: StepOver) -> None:
        """Let the scheduler see a step and decide."""
        self._observe(event)
        self._decide()

    def see_prompt(self, demand: Demand, n_tokens: int, now_us: float) -> None:
        """Count one layer of the prompt, and let its most used experts take free slots, a fair share of them.

        As spac_prompt_counts does in the engine.
        """
        self.board.prompt_counts.reshape(-1)[demand.keys] += demand.rows.astype(np.uint32)
        if self.decision.fills:
            group = self.board.group[demand.il]
            n_layers = int(np.count_nonzero((self.board.group == group) & (self.board.expert_bytes > 0)))
            share = -(-int(self.board.group_slots[demand.il]) // n_layers)
            self.link.fill(demand, 255 * demand.rows // n_tokens, share, now_us)

    def end_prompt(self, now_us: float) -> None:
        """Decide before the first step."""
        self._observe_copies()
        self._decide()
        if self.decision.is_obeyed:
            self.apply(now_us)

    def _decide(self) -> None:
        self.scheduler.step()
        self._take_over()

    def _take_over(self) -> None:
        np.copyto(self.decision.utility, self.board.utility.ravel())
        np.copyto(self.decision.tau, self.board.tau)

    def _observe(self, event: StepOver) -> None:
        """Write what happened in the step to the board, as the engine does."""
        board, times = self.board, event.times
        counts = board.counts.reshape(-1)
        for demand in event.demands:
            counts[demand.keys] += demand.rows.astype(np.uint32)
        stats = board.layer_stats
        for il, layer in times.layers.items():
            stats[il]["n_calls"] += 1
            stats[il]["n_device_experts"] += layer.n_device
            stats[il]["n_host_experts"] += layer.n_host
            stats[il]["n_device_rows"] += layer.device_rows
            stats[il]["n_host_rows"] += layer.host_rows
            stats[il]["host_us"] += round(layer.host_us)
            stats[il]["layer_us"] += round(layer.layer_us)
        self._observe_copies()
        board.counters["n_forward"] += np.uint64(1)
        board.record_step(
            StepRecord(
                step=event.step,
                n_draft=event.n_draft,
                n_accepted=max(event.n_emitted - 1, 0),
                n_tokens=event.n_tokens,
                draft_us=round(times.draft_us),
                verify_us=round(times.verify_us),
            )
        )

    def _observe_copies(self) -> None:
        now = (self.books.bytes_moved, self.books.link_us)
        for name, after, before in zip(("loaded_bytes", "load_us"), now, self._before, strict=True):
            self.board.counters[name] += np.uint64(max(round(after) - round(before), 0))
        self._before = now

    def apply(self, now_us: float) -> None:
        """Take the decision over as the engine does: waiting copies change levels, then new ones come."""
        link, residency = self.link, self.cache.residency
        link.advance(now_us)
        link.set_budget(int(self.board.byte_budget[0]))
        waiting = link.drain()
        residency[waiting] = Residency.ABSENT
        wanted = [*waiting, *(int(key) for key in self.board.load[: int(self.board.n_load[0])])]
        utility, tau, n_expert = self.decision.utility, self.decision.tau, self.cache.n_expert
        copies = [(key, int(utility[key])) for key in wanted if utility[key] >= tau[key // n_expert]]
        link.reorder_fills(utility)
        link.submit(copies, now_us)
