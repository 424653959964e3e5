"""Step 3: utility levels and measured costs in, a threshold tau per layer out (moe-spac.txt 3.3 and C.2).

Experts with utility >= tau are hot: they belong on the device. Per layer and tau in 1 .. n_levels:

    T_cpu(tau) = u_c(tau) * load_us + a_c(tau) * row_us    cold experts and their rows    (eq. 7, ours)
    T_gpu(tau) = u_g(tau) * device_us                      hot experts in use             (eq. 8)
    n(tau)     = hot experts that are absent               to be copied
    minimise |T_cpu - T_gpu|                                                              (eq. 9)
    subject to link_us * n(tau) <= max(T_cpu, T_gpu) + draft_us / n_layer                 (eq. 10)
               slots for all hot experts of the layout group                              (eq. 11)

u_c, a_c and u_g are what the paper writes r_c * gamma * k and r_g * b: learned online, per layer, by level.
tau = K where nothing is feasible. Making the tables by level reads every expert once; the solution itself is
O(n_layer * n_levels), whatever the number of experts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyspac.board import BoardView, LayoutGroups, Residency
from pyspac.config import SchedulerConfig
from pyspac.cost_model import CostModel

_REMEMBER = 0.95  # per step: what is left of the past in the tables


class LevelTables:
    """How often experts of each level are used, and how many there are.

    Tables are [n_layer, n_levels + 1] and run from the highest level down: column j is level n_levels - j, so
    that a running sum over columns counts the experts of that level or above.
    """

    def __init__(self, n_layer: int, n_expert: int, n_levels: int) -> None:
        """Start with every expert at level 0 and nothing seen."""
        self.shape = (n_layer, n_levels + 1)
        self.n_levels = n_levels
        self.by_level = np.zeros(self.shape)  # experts now at each level
        self.rows = np.zeros(self.shape)  # activations per step, decayed sum
        self.used = np.zeros(self.shape)  # distinct experts used per step, decayed sum
        self.seen = np.zeros(n_levels + 1)  # experts at a level per step, over all layers, decayed sum
        self.weight = 0.0  # steps, decayed sum
        self._last = (np.arange(n_layer) * (n_levels + 1) + n_levels)[:, None]  # where level 0 of a layer is
        self._index = np.zeros((n_layer, n_expert), np.intp)  # each expert's place in a flat table
        self._is_used = np.zeros((n_layer, n_expert), bool)
        self.place(np.zeros((n_layer, n_expert), np.uint8))

    def place(self, levels: NDArray[np.uint8]) -> None:
        """Take in the levels [n_layer, n_expert] that hold from now on."""
        np.subtract(self._last, levels, out=self._index, casting="unsafe")
        self.by_level = self._histogram(self._index.ravel())

    def count(self, mask: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Count the experts of `mask` [n_layer, n_expert] by level."""
        return self._histogram(self._index.ravel()[mask.ravel().nonzero()[0]])

    def _histogram(self, at: NDArray[np.intp], weights: NDArray[Any] | None = None) -> NDArray[np.float64]:
        counted = np.bincount(at, weights, self.shape[0] * self.shape[1])
        return counted.reshape(self.shape).astype(np.float64, copy=False)

    def observe(self, counts: NDArray[np.uint32]) -> None:
        """Learn what the experts did in a step, by the level each was placed at before it."""
        np.greater(counts, 0, out=self._is_used)  # nonzero() is fast on bool alone
        is_used = self._is_used.ravel().nonzero()[0]
        at = self._index.ravel()[is_used]
        self.rows *= _REMEMBER
        self.rows += self._histogram(at, counts.ravel()[is_used])
        self.used *= _REMEMBER
        self.used += self._histogram(at)
        self.seen *= _REMEMBER
        self.seen += self.by_level.sum(axis=0)
        self.weight = _REMEMBER * self.weight + 1.0

    def use_probability(self) -> NDArray[np.float64]:
        """Return [n_levels + 1], by level from 0 up: the chance of use in the next step, never falling."""
        used = self.used.sum(axis=0)
        mean = used.sum() / max(self.seen.sum(), 1.0)
        return np.asarray(np.maximum.accumulate(((used + mean) / (self.seen + 1.0))[::-1]))


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

    def __init__(self, board: BoardView, config: SchedulerConfig, cost: CostModel) -> None:
        """Allocate for the board's geometry."""
        self.groups = LayoutGroups(board)
        self.cost = cost
        self.n_levels = config.effective_levels
        self.fixed = config.fixed_threshold
        # eq. 10 layer by layer rounds to "no copy at all" on slow links; all but the paper's own estimator
        # ration copies by the byte budget of the whole step instead
        self.is_io_per_layer = config.estimator == "spac"
        self.tables = LevelTables(board.n_layer, board.n_expert, self.n_levels)
        self.tau = np.full(board.n_layer, self.fixed or self.n_levels, np.uint8)  # [n_layer]
        self.is_balanced = False  # whether measured costs decided the last tau (else capacity alone)
        self._n_layer = board.n_layer
        self._is_held = np.zeros((board.n_layer, board.n_expert), bool)  # queued, loading or resident
        self._n_held = np.zeros(self.groups.n_group)  # [n_group]
        self._rows = np.arange(board.n_layer)
        self._taus = np.arange(self.n_levels, 0, -1)  # of the columns of a table
        self._link_bytes = self.groups.expert_bytes[self.groups.of_layer]  # [n_layer]

    def observe(self, counts: NDArray[np.uint32]) -> None:
        """Learn from a step: what became of the levels that the last solve() was given."""
        self.tables.observe(counts)

    def solve(self, levels: NDArray[np.uint8], residency: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return tau [n_layer] for these levels, the same array every time."""
        self.tables.place(levels)
        if self.fixed is not None:
            return self.tau
        hot, absent_hot = self.hot_tables(residency)
        tau = self.solve_tables(hot, absent_hot)
        tau = self._use_free_slots(tau, absent_hot)
        np.copyto(self.tau, tau, casting="unsafe")
        return self.tau

    def hot_tables(self, residency: NDArray[np.uint8]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return hot experts, and the absent ones of them [n(tau)]: [n_layer, K], column K - tau."""
        np.greater(residency, Residency.ABSENT, out=self._is_held)
        held = self.tables.count(self._is_held)
        self._n_held = self.groups.total(held.sum(axis=1))
        by_level = self.tables.by_level
        return self._at_least(by_level), self._at_least(by_level - held)

    def _at_least(self, by_level: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return running sums without level 0: [n_layer, K + 1] -> [n_layer, K]."""
        return np.asarray(np.cumsum(by_level[:, : self.n_levels], axis=1))

    def solve_tables(self, hot: NDArray[np.float64], absent_hot: NDArray[np.float64]) -> NDArray[np.intp]:
        """Return [n_layer] tau for the tables of hot_tables: O(n_layer * K)."""
        self.is_balanced = self.cost.is_balanceable and self.tables.weight > 0
        return self._balance(hot, absent_hot) if self.is_balanced else self._fit_slots(hot, None)

    def _balance(self, hot: NDArray[np.float64], absent_hot: NDArray[np.float64]) -> NDArray[np.intp]:
        """Solve equations 9 to 12: without the slots first (what each layer wants), then within them."""
        t_cpu, t_gpu = self.layer_times()
        is_feasible = self._has_link_time(t_cpu, t_gpu, absent_hot)
        wanted = choose_threshold(t_cpu, t_gpu, is_feasible)
        lowest = self._fit_slots(hot, wanted)
        if is_feasible is None:
            return np.maximum(wanted, lowest)  # T_cpu - T_gpu is monotone: the nearest allowed tau is best
        is_feasible &= self._taus >= lowest[:, None]
        return choose_threshold(t_cpu, t_gpu, is_feasible)

    def layer_times(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return T_cpu and T_gpu in microseconds, each [n_layer, K], column K - tau (equations 7 and 8)."""
        load_us, row_us, device_us = self.cost.layer_units()
        scale = 1.0 / max(self.tables.weight, 1e-9)
        used, rows = self.tables.used, self.tables.rows
        host_us = used * (scale * load_us)[:, None] + rows * (scale * row_us)[:, None]  # by level
        t_cpu = host_us.sum(axis=1)[:, None] - self._at_least(host_us)
        return t_cpu, self._at_least(used) * (scale * device_us)[:, None]

    def _has_link_time(
        self, t_cpu: NDArray[np.float64], t_gpu: NDArray[np.float64], absent_hot: NDArray[np.float64]
    ) -> NDArray[np.bool_] | None:
        """Return [n_layer, K] whether the copies fit the layer's time (equation 10); None: no such limit."""
        link = self.cost.link_us_per_byte
        if link is None or not self.is_io_per_layer:
            return None
        window = np.maximum(t_cpu, t_gpu) + self.cost.draft_us / self._n_layer
        return np.asarray(link * self._link_bytes[:, None] * absent_hot <= window)

    def _fit_slots(self, hot: NDArray[np.float64], wanted: NDArray[np.intp] | None) -> NDArray[np.intp]:
        """Return [n_layer] the lowest tau at which a layout group's hot experts fit its slots (equation 11).

        One level for all layers of a group: a slot goes where utility is highest, whichever the layer. A
        layer that wants a higher tau (`wanted`) leaves its share to the others. K where they do not fit at
        all.
        """
        if wanted is not None:
            hot = np.minimum(hot, hot[self._rows, self.n_levels - wanted][:, None])
        fits = self.groups.total(hot) <= self.groups.slots[:, None]  # [n_group, K], true then false
        lowest = self.n_levels + 1 - np.maximum(fits.sum(axis=1), 1)
        return np.asarray(lowest[self.groups.of_layer])

    def _use_free_slots(self, tau: NDArray[np.intp], absent_hot: NDArray[np.float64]) -> NDArray[np.intp]:
        """Lower tau by one where a group has slots nobody holds beyond what its hot experts will take.

        A whole level rarely fits the slots exactly; without this the remainder would stay empty. Nobody is
        evicted for it: the plan stops at the free slots.
        """
        n_free = self.groups.slots - self._n_held  # [n_group]
        if not (n_free > 0).any():
            return tau
        has_room = n_free > self.groups.total(absent_hot[self._rows, self.n_levels - tau])
        return np.asarray(np.maximum(tau - has_room[self.groups.of_layer], 1))
