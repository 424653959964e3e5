"""Step 4: utilities, thresholds and residency in, an ordered list of experts to copy out (a PrefetchPlan).

The plan is advice: the engine takes the highest utility first, evicts the lowest-utility resident below its
tau, and drops what no longer fits. The plan keeps the list short enough that nothing has to be dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pyspac.engine.board import BoardView, LayoutGroups
from pyspac.scheduler.config import SchedulerConfig
from pyspac.scheduler.occupancy import Occupancy


@dataclass(frozen=True, slots=True)
class PrefetchPlan:
    """What to copy, most useful first."""

    load: NDArray[np.uint32]  # [n_load] il * n_expert + ie
    load_bytes: int
    n_wanted: int  # hot and absent, before slots and budget cut the list

    @property
    def n_load(self) -> int:
        """Return the number of copies."""
        return len(self.load)


EMPTY_PLAN = PrefetchPlan(np.zeros(0, np.uint32), 0, 0)


def n_admitted(
    newcomers: NDArray[np.float64], n_free: int, victims: NDArray[np.float64], margin: float
) -> int:
    """Return how many newcomers may come: into free slots, then for victims worth `margin` less.

    newcomers: worth, falling. victims: worth, rising. The i-th newcomer after the free slots meets the i-th
    victim.
    """
    n_free = max(n_free, 0)
    n_swap = min(len(newcomers) - n_free, len(victims))
    if n_swap <= 0:
        return min(len(newcomers), n_free)
    gain = newcomers[n_free : n_free + n_swap] - victims[:n_swap]
    return n_free + int(np.count_nonzero(gain >= margin))


class Prefetcher:
    """Makes one plan per step: O(n log n) in the experts that are hot and absent, usually a few."""

    def __init__(self, board: BoardView, config: SchedulerConfig) -> None:
        """Read the board's geometry."""
        self.groups = LayoutGroups(board)
        self.n_expert = board.n_expert
        self.n_load_max = board.n_load_max
        self.can_evict = "evict" not in config.without
        payback = config.effective_payback_steps
        self.margin = max(1.0 / payback if payback > 0 else 0.0, 1e-10)
        self._bytes = board.expert_bytes.astype(np.int64)  # [n_layer]
        self._count_key = -_count_worth(self._bytes)  # [n_layer]
        self._not_split = np.flatnonzero(~self.groups.is_split)
        self._is_hot = np.zeros((board.n_layer, board.n_expert), bool)
        self._mask = np.zeros((board.n_layer, board.n_expert), bool)

    def plan(
        self,
        utility: NDArray[np.uint8],  # [n_layer, n_expert]
        tau: NDArray[np.uint8],  # [n_layer]
        slots: Occupancy,
        counts: NDArray[np.uint32],  # [n_layer, n_expert] of the last step
        worth: NDArray[np.float64],  # [n_levels + 1] by level, rising: chance of use in a step
        byte_limit: int | None,  # copies may take so much per step; None: no limit
    ) -> PrefetchPlan:
        """Return what to copy: highest utility first, then most recent activations per byte, then layer."""
        np.greater_equal(utility, tau[:, None], out=self._is_hot)
        if len(self._not_split) > 0:
            self._is_hot[self._not_split] = False
        np.greater(self._is_hot, slots.is_held, out=self._mask)
        wanted = self._mask.ravel().nonzero()[0]
        if len(wanted) == 0:
            return EMPTY_PLAN
        wanted = self._in_order(wanted, utility, counts)
        admitted = self._fitting_slots(wanted, utility, slots, worth)
        load, load_bytes = self._within_budget(admitted, byte_limit, slots.under_way_bytes)
        return PrefetchPlan(load.astype(np.uint32), load_bytes, len(wanted))

    def _in_order(
        self, wanted: NDArray[np.intp], utility: NDArray[np.uint8], counts: NDArray[np.uint32]
    ) -> NDArray[np.intp]:
        """Sort flat expert indices; stable, so that equals stay in layer order."""
        key = counts.take(wanted) * self._count_key.take(wanted // self.n_expert)
        key -= utility.take(wanted)
        return wanted.take(key.argsort(kind="stable"))

    def _fitting_slots(
        self,
        wanted: NDArray[np.intp],  # in order
        utility: NDArray[np.uint8],
        slots: Occupancy,
        worth: NDArray[np.float64],
    ) -> NDArray[np.intp]:
        """Return those of `wanted` that find a slot: free, or held by an expert worth less by the margin."""
        victims = self._victims(slots)
        if self.groups.n_group == 1:
            return wanted[: self._n_fitting(wanted, slots.n_free[0], victims, utility, worth)]
        keep = np.zeros(len(wanted), bool)
        group_of = self.groups.of_layer[wanted // self.n_expert]
        victim_group = self.groups.of_layer[victims // self.n_expert]
        for g in range(self.groups.n_group):
            mine, theirs = np.flatnonzero(group_of == g), victims[victim_group == g]
            n = self._n_fitting(wanted[mine], slots.n_free[g], theirs, utility, worth)
            keep[mine[:n]] = True
        return wanted[keep]

    def _n_fitting(
        self,
        newcomers: NDArray[np.intp],  # in order
        n_free: int,
        victims: NDArray[np.intp],
        utility: NDArray[np.uint8],
        worth: NDArray[np.float64],
    ) -> int:
        rising = utility.take(victims)
        rising.sort(kind="stable")
        rising = rising[: len(newcomers)]
        return n_admitted(worth.take(utility.take(newcomers)), n_free, worth.take(rising), self.margin)

    def _victims(self, slots: Occupancy) -> NDArray[np.intp]:
        """Return residents below their layer's tau, flat: the only ones the engine may evict."""
        if not self.can_evict:
            return np.zeros(0, np.intp)
        np.greater(slots.is_resident, self._is_hot, out=self._mask)
        return self._mask.ravel().nonzero()[0]

    def _within_budget(
        self, admitted: NDArray[np.intp], byte_limit: int | None, under_way_bytes: int
    ) -> tuple[NDArray[np.intp], int]:
        """Cut the list where it, with what is under way, exceeds the budget; one copy always may go."""
        admitted = admitted[: self.n_load_max]
        total = self._bytes.take(admitted // self.n_expert).cumsum()
        if byte_limit is not None:
            n = int(total.searchsorted(byte_limit - under_way_bytes, side="right"))
            n = max(n, 1 if under_way_bytes == 0 else 0)
            total, admitted = total[:n], admitted[:n]
        return admitted, int(total[-1]) if len(total) > 0 else 0


def _count_worth(expert_bytes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return [n_layer] what one activation adds to a level in the order of the plan.

    In proportion to 1 / bytes, and so small that no number of activations (32 bits) makes up for a level.
    """
    least = expert_bytes[expert_bytes > 0].min()
    return np.asarray(least / np.maximum(expert_bytes, 1) * 2.0**-32)
