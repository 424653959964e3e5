"""Step 4: utilities, thresholds and residency in, an ordered list of experts to copy out (a PrefetchPlan).

The plan is advice: the engine takes the highest utility first, evicts the lowest-utility resident below its
tau, and drops what no longer fits. The plan keeps the list short enough that nothing has to be dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pyspac.board import BoardView, LayoutGroups, Residency
from pyspac.config import SchedulerConfig


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
        self.margin = 1.0 / payback if payback > 0 else 0.0
        self._bytes = board.expert_bytes.astype(np.int64)  # [n_layer]
        self._is_hot = np.zeros((board.n_layer, board.n_expert), bool)
        self._mask = np.zeros((board.n_layer, board.n_expert), bool)

    def plan(
        self,
        utility: NDArray[np.uint8],  # [n_layer, n_expert]
        tau: NDArray[np.uint8],  # [n_layer]
        residency: NDArray[np.uint8],  # [n_layer, n_expert]
        counts: NDArray[np.uint32],  # [n_layer, n_expert] of the last step
        worth: NDArray[np.float64],  # [n_levels + 1] by level, never falling: chance of use in a step
        byte_limit: int | None,  # copies may take so much per step; None: no limit
    ) -> PrefetchPlan:
        """Return what to copy: highest utility first, then most recent activations per byte, then layer."""
        np.greater_equal(utility, tau[:, None], out=self._is_hot)
        np.equal(residency, Residency.ABSENT, out=self._mask)
        n_absent = np.count_nonzero(self._mask, axis=1)  # [n_layer]
        np.logical_and(self._mask, self._is_hot, out=self._mask)
        wanted = self._mask.ravel().nonzero()[0]
        wanted = wanted[self.groups.is_split[wanted // self.n_expert]]
        if len(wanted) == 0:
            return EMPTY_PLAN
        wanted = self._in_order(wanted, utility, counts)
        np.equal(residency, Residency.RESIDENT, out=self._mask)
        n_resident = np.count_nonzero(self._mask, axis=1)
        admitted = wanted[self._fits_slots(wanted, utility, self.n_expert - n_absent, worth)]
        under_way_bytes = int((self.n_expert - n_absent - n_resident) @ self._bytes)
        load, load_bytes = self._within_budget(admitted, byte_limit, under_way_bytes)
        return PrefetchPlan(load.astype(np.uint32), load_bytes, len(wanted))

    def _in_order(
        self, wanted: NDArray[np.intp], utility: NDArray[np.uint8], counts: NDArray[np.uint32]
    ) -> NDArray[np.intp]:
        """Sort flat expert indices; stable, so that equals stay in layer order."""
        per_byte = counts.ravel()[wanted] / self._bytes[wanted // self.n_expert]
        level = utility.ravel()[wanted].astype(np.int16)
        return wanted[np.lexsort((-per_byte, -level))]

    def _fits_slots(
        self,
        wanted: NDArray[np.intp],
        utility: NDArray[np.uint8],
        n_held: NDArray[np.intp],  # [n_layer] experts queued, loading or resident
        worth: NDArray[np.float64],
    ) -> NDArray[np.bool_]:
        """Return which of `wanted` find a slot: free, or held by an expert worth less by the margin."""
        n_free = self.groups.slots - self.groups.total(n_held)
        victims = self._victims()
        # levels decide, worth only adds the margin: two levels may be worth the same by chance
        value = worth + 1e-9 * np.arange(len(worth))
        margin = max(self.margin, 1e-10)
        levels = utility.ravel()
        if self.groups.n_group == 1:
            victim_levels = np.sort(levels[victims], kind="stable")
            n = n_admitted(value[levels[wanted]], int(n_free[0]), value[victim_levels], margin)
            return np.asarray(np.arange(len(wanted)) < n)
        keep = np.zeros(len(wanted), bool)
        group_of = self.groups.of_layer[wanted // self.n_expert]
        victim_group = self.groups.of_layer[victims // self.n_expert]
        for g in range(self.groups.n_group):
            mine = np.flatnonzero(group_of == g)
            victim_levels = np.sort(levels[victims[victim_group == g]], kind="stable")
            n = n_admitted(value[levels[wanted[mine]]], int(n_free[g]), value[victim_levels], margin)
            keep[mine[:n]] = True
        return keep

    def _victims(self) -> NDArray[np.intp]:
        """Return residents (in _mask) below their layer's tau, flat: the only ones the engine may evict."""
        if not self.can_evict:
            return np.zeros(0, np.intp)
        np.greater(self._mask, self._is_hot, out=self._mask)
        return self._mask.ravel().nonzero()[0]

    def _within_budget(
        self, admitted: NDArray[np.intp], byte_limit: int | None, under_way_bytes: int
    ) -> tuple[NDArray[np.intp], int]:
        """Cut the list where it, with what is under way, exceeds the budget; one copy always may go."""
        admitted = admitted[: self.n_load_max]
        total = np.cumsum(self._bytes[admitted // self.n_expert])
        if byte_limit is not None:
            n = int(np.searchsorted(total, byte_limit - under_way_bytes, side="right"))
            n = max(n, 1 if under_way_bytes == 0 else 0)
            total, admitted = total[:n], admitted[:n]
        return admitted, int(total[-1]) if len(total) > 0 else 0
