"""The shipping scheduler inside the lab: a board that the simulator fills, and the engine's way to obey it.

Estimator, balancer and prefetcher are `pyspac.Scheduler` itself. What it learns from (activation
counts, residency, copy times, layer times) is written to a `LocalBoard` as the engine would, with predicted
times.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pyspac.engine.board import BoardGeometry, LocalBoard, Residency
from pyspac.engine.step import StepRecord
from pyspac.lab.state import RunState
from pyspac.scheduler.activations import Activity
from pyspac.scheduler.config import SchedulerConfig
from pyspac.scheduler.prefetch import PrefetchPlan
from pyspac.scheduler.scheduler import Scheduler


class LabScheduler(Scheduler):
    """The shipping scheduler; its plan may count on residents that are spent (moe-spac.txt, Appendix D)."""

    def __init__(self, board: LocalBoard, config: SchedulerConfig) -> None:
        """Nobody is spent."""
        super().__init__(board, config)
        self.is_spent = np.zeros((board.n_layer, board.n_expert), bool)

    def _plan(self, utility: NDArray[np.uint8], tau: NDArray[np.uint8], activity: Activity) -> PrefetchPlan:
        """Plan as if spent residents had utility 0: a newcomer may take their slots."""
        return super()._plan(np.where(self.is_spent & self.slots.is_resident, 0, utility), tau, activity)


class ShippingScheduler:
    """One scheduler per run, stepped once per step, however many policies ask."""

    def __init__(self, run: RunState, config: SchedulerConfig) -> None:
        """Make a board of the run's geometry that shares the cache's residency."""
        self.run = run
        g = run.geometry
        slots = [run.group_slots[i] if size else 0 for i, size in zip(g.group, g.expert_bytes, strict=True)]
        self.board = LocalBoard(
            BoardGeometry(
                n_layer=g.n_layer, n_expert=g.n_expert, n_expert_used=g.n_expert_used,
                expert_bytes=g.expert_bytes, group=g.group,
                group_slots=slots,
                max_batch=run.k + 1,
            )
        )  # fmt: skip
        self.board.residency = run.cache.residency.reshape(g.n_layer, g.n_expert)
        self.scheduler = LabScheduler(self.board, config)
        self.utility = np.zeros(run.n_cell, np.uint8)  # as the engine applied it
        self.tau = np.ones(g.n_layer, np.uint8)
        self.is_engine = False  # whether the plan is carried out, so that the engine's rules hold
        run.cache.can_evict = "evict" not in config.without
        self._stepped = -1
        self._before = (0.0, 0.0)  # bytes, microseconds on the link

    def step(self) -> None:
        """Decide once per step of the run."""
        if self._stepped == self.run.step_index:
            return
        self._stepped = self.run.step_index
        self._observe()
        self.scheduler.step()
        np.copyto(self.utility, self.board.utility.ravel())
        np.copyto(self.tau, self.board.tau)

    def _observe(self) -> None:
        """Write what happened in the step to the board, as the engine does."""
        run, board = self.run, self.board
        counts = board.counts.reshape(-1)
        for demand in run.step.layers:
            counts[demand.keys] += demand.rows.astype(np.uint32)
        stats = board.layer_stats
        for il, times in run.times.layers.items():
            stats[il]["n_calls"] += 1
            stats[il]["n_device_experts"] += times.n_device
            stats[il]["n_host_experts"] += times.n_host
            stats[il]["n_device_rows"] += times.device_rows
            stats[il]["n_host_rows"] += times.host_rows
            stats[il]["host_us"] += round(times.host_us)
            stats[il]["layer_us"] += round(times.layer_us)
        self._observe_copies()
        board.counters["n_forward"] += np.uint64(1)
        board.record_step(
            StepRecord(
                step=run.step_index,
                n_draft=run.step.n_draft,
                n_accepted=max(run.step.n_emitted - 1, 0),
                n_tokens=len(run.step.tokens),
                draft_us=round(run.times.draft_us),
                verify_us=round(run.times.verify_us),
            )
        )

    def _observe_copies(self) -> None:
        books = self.run.books
        now = (books.bytes_moved, books.link_us)
        for name, after, before in zip(("loaded_bytes", "load_us"), now, self._before, strict=True):
            self.board.counters[name] += np.uint64(max(round(after) - round(before), 0))
        self._before = now

    def apply(self) -> None:
        """Take the decision over as the engine does: waiting copies change levels, then new ones come."""
        link, residency = self.run.link, self.run.cache.residency
        link.advance(self.run.now)
        link.set_budget(int(self.board.byte_budget[0]))
        waiting = link.drain()
        residency[waiting] = Residency.ABSENT
        wanted = [*waiting, *(int(key) for key in self.board.load[: int(self.board.n_load[0])])]
        copies = [(key, int(self.utility[key])) for key in wanted if self.is_wanted(key)]
        link.submit(copies, self.run.now)

    def is_wanted(self, key: int) -> bool:
        """Return whether an expert belongs on the device."""
        return bool(self.utility[key] >= self.tau[key // self.run.n_expert])
