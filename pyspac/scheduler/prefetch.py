"""Step 4: utilities, thresholds and residency in, an ordered list of experts to copy out (a PrefetchPlan).

The plan is advice: the engine takes the highest utility first, evicts the lowest-utility resident below its
tau, and drops what no longer fits. The plan keeps the list short enough that nothing has to be dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pyspac.engine.board import Board
from pyspac.engine.layout_groups import LayoutGroups
from pyspac.scheduler.config import SchedulerConfig
from pyspac.scheduler.occupancy import Occupancy

_NO_LOADS = np.zeros(0, np.uint32)


@dataclass(frozen=True, slots=True)
class PrefetchPlan:
    """What to copy, most useful first."""

    load: NDArray[np.uint32]  # [n_load] il * n_expert + ie
    # with a look-ahead: of `load`, those that only a prediction asks for
    ahead: NDArray[np.uint32] = field(default_factory=lambda: _NO_LOADS)
    n_refused: int = 0  # absent and predicted, but a copy would not pay
    n_late: int = 0  # absent and predicted, but a copy would come after its layer

    @property
    def n_load(self) -> int:
        """Return the number of copies."""
        return len(self.load)


EMPTY_PLAN = PrefetchPlan(_NO_LOADS)


class Prefetcher:
    """Makes one plan per step: O(n log n) in the experts that are hot and absent, usually a few."""

    def __init__(self, board: Board, config: SchedulerConfig) -> None:
        """Read the board's geometry."""
        self.groups = LayoutGroups(board)
        self.n_expert = board.n_expert
        self.can_evict = "evict" not in config.without
        payback = config.effective_payback_steps
        self.margin = 1.0 / payback if payback > 0 else 0.0
        self.bytes = board.expert_bytes.astype(np.int64)  # [n_layer]

    def plan(
        self,
        utility: NDArray[np.uint8],  # [n_layer, n_expert]
        tau: NDArray[np.uint8],  # [n_layer]
        slots: Occupancy,
        counts: NDArray[np.uint32],  # [n_layer, n_expert] of the last step
        worth: NDArray[np.float64],  # [n_levels + 1] by level, never falling: chance of use in a step
        byte_limits: Sequence[int | None],  # [n_device] copies may take so much per step; None: no limit
    ) -> PrefetchPlan:
        """Return what to copy: highest utility first, then most recent activations per byte, then layer."""
        is_hot = utility >= tau[:, None]
        if not self.groups.is_all_split:
            is_hot &= self.groups.is_split[:, None]
        wanted = np.flatnonzero(is_hot & ~slots.is_held)
        if len(wanted) == 0:
            return EMPTY_PLAN
        is_victim = slots.is_resident & ~is_hot if self.can_evict else np.zeros_like(is_hot)
        if not self.groups.is_all_split:
            is_victim &= self.groups.is_split[:, None]
        wanted = self._in_order(wanted, utility, counts)
        admitted = self._fitting_slots(wanted, is_victim, slots.n_free, utility, worth)
        load = admitted[self.within_budget(admitted, byte_limits, slots.under_way_bytes)]
        return PrefetchPlan(load.astype(np.uint32))

    def _in_order(
        self, wanted: NDArray[np.intp], utility: NDArray[np.uint8], counts: NDArray[np.uint32]
    ) -> NDArray[np.intp]:
        """Sort flat expert indices: see `plan`; equals stay in their order."""
        levels = utility.ravel()[wanted].astype(np.int64)
        counts_per_byte = counts.ravel()[wanted] / self.bytes[wanted // self.n_expert]
        return wanted[np.lexsort((-counts_per_byte, -levels))]  # the last key comes first

    def _fitting_slots(
        self,
        wanted: NDArray[np.intp],  # in order
        is_victim: NDArray[np.bool_],  # [n_layer, n_expert] residents that the engine may evict
        n_free: NDArray[np.int64],  # [n_group] slots
        utility: NDArray[np.uint8],
        worth: NDArray[np.float64],
    ) -> NDArray[np.intp]:
        """Return those of `wanted` that find a slot: free, or held by an expert worth less by the margin."""
        is_admitted = np.zeros(len(wanted), bool)
        group = self.groups.of_layer[wanted // self.n_expert]
        for g, layers in enumerate(self.groups.layers):
            mine = np.flatnonzero(group == g)
            newcomers = utility.ravel()[wanted[mine]]  # levels, falling
            victims = np.sort(utility[layers][is_victim[layers]])  # levels, rising
            n = n_admitted(newcomers, int(n_free[g]), victims, worth, self.margin)
            is_admitted[mine[:n]] = True
        return wanted[is_admitted]

    def within_budget(
        self,
        admitted: NDArray[np.intp],
        byte_limits: Sequence[int | None],
        under_way_bytes: Sequence[int],
    ) -> NDArray[np.intp]:
        """Return which positions of the list may go: each device's first ones, to the end of its budget.

        What is under way is in the budget too; one copy always may go. Both are [n_device].
        """
        layer = admitted // self.n_expert
        n_bytes = self.bytes[layer]
        if self.groups.n_device == 1:
            return np.arange(n_fitting(n_bytes, byte_limits[0], under_way_bytes[0]))
        kept = []
        for device, limit in enumerate(byte_limits):
            mine = np.flatnonzero(self.groups.device_of_layer[layer] == device)
            kept.append(mine[: n_fitting(n_bytes[mine], limit, under_way_bytes[device])])
        return np.sort(np.concatenate(kept))


def n_fitting(n_bytes: NDArray[np.int64], limit: int | None, under_way_bytes: int) -> int:
    """Return how many copies of these sizes may go, as `Prefetcher.within_budget` says."""
    if limit is None:
        return len(n_bytes)
    n = int(np.count_nonzero(np.cumsum(n_bytes) <= limit - under_way_bytes))
    return max(n, 1 if under_way_bytes == 0 and len(n_bytes) > 0 else 0)


def n_admitted(
    newcomers: NDArray[np.uint8],  # levels, falling
    n_free: int,
    victims: NDArray[np.uint8],  # levels, rising
    worth: NDArray[np.float64],  # by level
    margin: float,
) -> int:
    """Return how many newcomers may come: into free slots, then for victims of a lower level, worth less.

    The i-th newcomer after the free slots meets the i-th victim, who must be worth less by `margin`.
    """
    n_free = max(n_free, 0)
    n_swap = min(len(newcomers) - n_free, len(victims))
    if n_swap <= 0:
        return min(len(newcomers), n_free)
    newcomers, victims = newcomers[n_free : n_free + n_swap], victims[:n_swap]
    pays = (newcomers > victims) & (worth[newcomers] - worth[victims] >= margin)
    return n_free + int(np.count_nonzero(pays))
