"""Step 3: utility levels and measured costs in, a threshold tau per layer out (MoE-SpAc 3.3 and C.2).

Experts with utility >= tau are hot: they belong on the device. Per layer and tau in 1 .. n_levels:

    T_cpu(tau) = u_c(tau) * load_us + a_c(tau) * row_us    cold experts and their rows    (eq. 7, ours)
    T_gpu(tau) = u_g(tau) * device_us + device_rest_us     hot experts in use             (eq. 8)
    n(tau)     = hot experts that are absent               to be copied
    minimise |T_cpu - T_gpu|                                                              (eq. 9)
    subject to link_us * n(tau) <= max(T_cpu, T_gpu) + draft_us / n_layer                 (eq. 10)
               slots for all hot experts of the layout group                              (eq. 11)

The device computes what it holds, hot or not, so residents count as hot in T_cpu and T_gpu (not with the
paper's own estimator): where they are enough, tau = K, and only the highest level is still copied.

u_c, a_c and u_g are what the paper writes r_c * gamma * k and r_g * b: learned online, per layer, by level.
tau = K where nothing is feasible. Making the tables by level reads every expert once; the solution itself is
O(n_layer * n_levels), whatever the number of experts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyspac.engine.board import Board
from pyspac.engine.layout_groups import LayoutGroups
from pyspac.scheduler.config import DECAY, SchedulerConfig
from pyspac.scheduler.cost_model import CostModel
from pyspac.scheduler.occupancy import Occupancy

_EVERY = 4  # steps, of which the tables learn from one: what a level means changes slowly
_N_WARM_UP = 16  # steps that all are learned from
_NOTHING = 1e-30  # sums below are 0: long before they become denormal, which is slow


class LevelTables:
    """How often experts of each level are used, and how many there are.

    Tables are [n_layer, n_levels + 1] and run from the highest level down: column j is level n_levels - j, so
    that a running sum over columns counts the experts of that level or above.
    """

    def __init__(self, n_layer: int, n_expert: int, n_levels: int) -> None:
        """Start with every expert at level 0 and nothing seen."""
        self.shape = (n_layer, n_levels + 1)
        self.n_levels = n_levels
        # decayed sums over the steps learned from
        self.rows = np.zeros(self.shape)  # activations
        self.used = np.zeros(self.shape)  # distinct experts used
        self.seen = np.zeros(self.shape)  # experts
        self.weight = 0.0  # those steps, decayed sum
        self.n_observed = 0  # all steps
        self._chance = np.zeros(n_levels + 1)  # use_probability()
        # [n_layer, 1] cell of a layer's level 0 in a flat table; its level j lies j cells before
        self._level_0 = (np.arange(n_layer) * (n_levels + 1) + n_levels)[:, None]
        self.place(np.zeros((n_layer, n_expert), np.uint8))

    def place(self, levels: NDArray[np.uint8]) -> None:
        """Take in the levels [n_layer, n_expert] that hold from now on."""
        self._cell = self._level_0 - levels  # [n_layer, n_expert]
        self.by_level = self._histogram(self._cell.ravel())  # experts now at each level

    def count(self, mask: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Count the experts of `mask` [n_layer, n_expert] by level."""
        return self._histogram(self._cell[mask])

    def _histogram(self, cells: NDArray[np.intp], weights: NDArray[Any] | None = None) -> NDArray[Any]:
        """Count how often each cell comes, or sum up its weights."""
        return np.bincount(cells, weights, self.shape[0] * self.shape[1]).reshape(self.shape)

    def observe(self, counts: NDArray[np.uint32], is_still: NDArray[np.bool_] | None = None) -> None:
        """Take in what the experts did in a step; renew the tables where it is time.

        is_still: [n_layer] layers that are not counted: what is known of them stays.
        """
        self.n_observed += 1
        if self.is_renewed():
            self._learn(counts, is_still)

    def is_renewed(self) -> bool:
        """Whether the last step was learned from: what rests on the tables is worked out again then."""
        return self.n_observed <= _N_WARM_UP or self.n_observed % _EVERY == 0

    def _learn(self, counts: NDArray[np.uint32], is_still: NDArray[np.bool_] | None) -> None:
        """Add a step to the sums, by the level each expert was placed at before it."""
        olds = self.rows, self.used, self.seen
        kept = DECAY if self.n_observed <= _N_WARM_UP else DECAY**_EVERY
        used = np.flatnonzero(counts > 0)
        cells = self._cell.ravel()[used]
        self.rows = kept * self.rows + self._histogram(cells, counts.ravel()[used])
        self.used = kept * self.used + self._histogram(cells)
        self.seen = kept * self.seen + self.by_level
        before, self.weight = self.weight, kept * self.weight + 1.0
        for table, old in zip((self.rows, self.used, self.seen), olds, strict=True):
            table[table < _NOTHING] = 0.0
            if is_still is not None and before > 0.0:
                table[is_still] = self.weight / before * old[is_still]  # the same per step

    def above(self, table: NDArray[Any]) -> NDArray[Any]:
        """Sum a table over the levels of tau and above: [n_layer, n_levels], without level 0."""
        return np.asarray(table[:, : self.n_levels].cumsum(axis=1))

    def use_probability(self) -> NDArray[np.float64]:
        """Return [n_levels + 1], by level from 0 up: the chance of use in the next step, never falling."""
        if self.is_renewed():
            used, seen = self.used.sum(axis=0), self.seen.sum(axis=0)
            mean = used.sum() / max(seen.sum(), 1.0)
            chance = (used + mean) / (seen + 1.0)  # from the highest level down
            self._chance = np.maximum.accumulate(chance[::-1])
        return self._chance


def choose_threshold(
    t_cpu: NDArray[np.float64], t_gpu: NDArray[np.float64], is_feasible: NDArray[np.bool_] | None = None
) -> NDArray[np.intp]:
    """Return [n_layer] the feasible tau in 1 .. K with the least |t_cpu - t_gpu|; K if none is feasible.

    Inputs are [n_layer, K], column K - tau. Equals equation 39 where the feasible set is contiguous and the
    difference monotone; needs neither. Of equal values the largest tau wins: the fewest copies.
    """
    distance = np.abs(t_cpu - t_gpu)
    if is_feasible is not None:
        distance[~is_feasible] = np.inf
    return np.asarray(distance.shape[1] - distance.argmin(axis=1))


class Balancer:
    """Chooses tau per layer, in place, once per step."""

    def __init__(self, board: Board, config: SchedulerConfig, cost: CostModel) -> None:
        """Allocate for the board's geometry."""
        self.groups = LayoutGroups(board)
        self.cost = cost
        self.n_levels = config.effective_levels
        self.fixed = config.fixed_threshold
        # the paper's own estimator; eq. 10 layer by layer rounds to "no copy at all" on slow links, so the
        # others ration copies by the byte budget of the whole step instead
        self.is_as_published = config.estimator == "spac"
        self.uses_free_slots = True  # the lab measures what that gains
        self.tables = LevelTables(board.n_layer, board.n_expert, self.n_levels)
        self.tau = np.full(board.n_layer, self.fixed or self.n_levels, np.uint8)  # [n_layer]
        self.is_balanced = False  # whether measured costs decided the last tau (else only capacity)
        self._n_layer = board.n_layer
        # share of each level's experts that the device has, or soon will
        self._held = np.zeros(self.tables.shape)
        self._wanted = np.full(board.n_layer, self.n_levels)  # [n_layer] tau, were there slots for all
        self._taus = np.arange(self.n_levels, 0, -1)  # of the columns of a table
        self._times = self.layer_times()  # T_cpu, T_gpu
        self._any_level = self._levels_from(np.ones(board.n_layer, np.intp))
        self._wanted_level = self._levels_from(self._wanted)
        self._link_bytes = self.groups.expert_bytes[self.groups.of_layer]  # [n_layer]

    def observe(self, counts: NDArray[np.uint32], is_still: NDArray[np.bool_] | None = None) -> None:
        """Learn from a step: what became of the levels that the last solve() was given.

        is_still: as of `LevelTables.observe`.
        """
        self.tables.observe(counts, is_still)

    def set_aside(self, is_aside: NDArray[np.bool_]) -> None:
        """Leave out these layers [n_layer] and their slots from now on."""
        self.groups.set_aside(is_aside)
        self._any_level = self._levels_from(np.ones(self._n_layer, np.intp))
        self._wanted_level = self._levels_from(self._wanted)

    def solve(self, levels: NDArray[np.uint8], slots: Occupancy) -> NDArray[np.uint8]:
        """Return tau [n_layer] for these levels, the same array every time."""
        self.tables.place(levels)
        if self.fixed is not None:
            return self.tau
        if self.tables.is_renewed() and not self.is_as_published:
            self._held = self.tables.count(slots.is_held) / np.maximum(self.tables.by_level, 1)
        self.tau[:] = self.solve_tables(self.absent_hot(slots))
        if self.uses_free_slots and slots.n_free.max() > 0:
            self._use_free_slots(levels, slots)
        return self.tau

    def absent_hot(self, slots: Occupancy) -> NDArray[np.int64] | None:
        """Return hot experts that are absent [n(tau)]: [n_layer, K], column K - tau.

        None where the link does not bound single layers.
        """
        if not self._has_link_limit():
            return None
        return self.tables.above(self.tables.by_level - self.tables.count(slots.is_held))

    def solve_tables(self, absent_hot: NDArray[np.int64] | None) -> NDArray[np.intp]:
        """Return [n_layer] tau for the levels placed last, and absent_hot's table: O(n_layer * K)."""
        self.is_balanced = self.tables.weight > 0 and self.cost.is_balanceable
        return self._balance(absent_hot) if self.is_balanced else self._fit_slots(self._any_level)

    def _balance(self, absent_hot: NDArray[np.int64] | None) -> NDArray[np.intp]:
        """Solve equations 9 to 12: without the slots first (what each layer wants), then within them."""
        if self.tables.is_renewed():
            self._times = self.layer_times()
            self._wanted = choose_threshold(*self._times)
            self._wanted_level = self._levels_from(self._wanted)
        if absent_hot is None:
            # T_cpu - T_gpu is monotone: the nearest allowed tau is best
            return np.asarray(np.maximum(self._wanted, self._fit_slots(self._wanted_level)))
        t_cpu, t_gpu = self._times
        is_feasible = self._has_link_time(t_cpu, t_gpu, absent_hot)
        wanted = choose_threshold(t_cpu, t_gpu, is_feasible)
        is_feasible &= self._taus >= self._fit_slots(self._levels_from(wanted))[:, None]
        return choose_threshold(t_cpu, t_gpu, is_feasible)

    def _levels_from(self, tau: NDArray[np.intp]) -> NDArray[np.int64]:
        """Return [n_group, n_layer, K + 1] 1 for the levels of tau and above in a group's layers, else 0."""
        is_above = np.arange(self.n_levels, -1, -1) >= tau[:, None]
        return np.asarray(self.groups.onehot[:, :, None] * is_above, np.int64)

    def layer_times(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return T_cpu and T_gpu in microseconds, each [n_layer, K], column K - tau (equations 7 and 8)."""
        scale = 1.0 / max(self.tables.weight, 1e-9)
        load_us, row_us, device_us = scale * self.cost.layer_units()[:, :, None]
        used, rows = self.tables.used, self.tables.rows
        host_us, device_us = used * load_us + rows * row_us, used * device_us  # by level
        t_cpu = host_us.sum(axis=1)[:, None] - self._of_device(host_us)
        return t_cpu, self._of_device(device_us) + self.cost.layer_rests()[:, None]

    def _of_device(self, us: NDArray[np.float64]) -> NDArray[np.float64]:
        """Sum a table over what the device computes at each tau: [n_layer, K], column K - tau."""
        held = self._held * us
        return np.asarray(held.sum(axis=1)[:, None] + self.tables.above(us - held))

    def _has_link_limit(self) -> bool:
        """Whether equation 10 binds: a link that is known, and a layer's copies have only its own time."""
        return self.is_as_published and bool(self.cost.layer_links().any())

    def _has_link_time(
        self, t_cpu: NDArray[np.float64], t_gpu: NDArray[np.float64], absent_hot: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Return [n_layer, K] whether the copies fit the layer's time (equation 10)."""
        window = np.maximum(t_cpu, t_gpu) + self.cost.draft_us / self._n_layer
        link_us = self.cost.layer_links() * self._link_bytes
        return np.asarray(link_us[:, None] * absent_hot <= window)

    def _fit_slots(self, wanted_level: NDArray[np.int64]) -> NDArray[np.intp]:
        """Return [n_layer] the lowest tau at which a layout group's hot experts fit its slots (equation 11).

        One level for all layers of a group: a slot goes where utility is highest, whichever the layer. A
        layer that wants only some levels (`wanted_level`, as _levels_from) leaves its share to the others. K
        where they do not fit at all.
        """
        n_wanted = (self.tables.by_level * wanted_level).sum(axis=1)  # [n_group, K + 1]
        hot = self.tables.above(n_wanted)  # [n_group, K], column K - tau
        n_fits = (hot <= self.groups.slots[:, None]).sum(axis=1)  # [n_group] taus, from K down
        lowest = self.n_levels + 1 - np.maximum(n_fits, 1)
        return np.asarray(lowest[self.groups.of_layer])

    def _use_free_slots(self, levels: NDArray[np.uint8], slots: Occupancy) -> None:
        """Lower tau by one where a group has more empty slots than its hot experts will take.

        A whole level rarely fits the slots exactly; without this the remainder would stay empty. No expert is
        evicted for it: the plan stops at the free slots.
        """
        is_wanted = (levels >= self.tau[:, None]) & ~slots.is_held
        has_room = slots.n_free > self.groups.count(is_wanted)  # [n_group]
        self.tau[:] = np.maximum(self.tau - has_room[self.groups.of_layer], 1)
