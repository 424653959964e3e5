"""Which layers the device shall hold whole: measures, asks `whole_layers`, and changes its mind rarely.

    wait -> probe -> choose -> wait -> choose ...

A probe holds one layer whole, to see what a stop costs. Then the choice stands until another one is better
for sure; each change copies layers' experts, within the byte budget, and rebuilds the graph.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pyspac.engine.board import BoardView, LayerMode
from pyspac.engine.layout_groups import LayoutGroups
from pyspac.scheduler.activations import Activity
from pyspac.scheduler.balancer import LevelTables
from pyspac.scheduler.cost_model import CostModel
from pyspac.scheduler.whole_layers import (
    MIN_GAIN,
    Demand,
    LayerCost,
    StopCost,
    choose_whole,
    n_whole_after,
    time_of,
)

# in steps of a full device
FIRST: Final = 64  # until demand is known: twice what ema remembers
EVERY: Final = 1024  # between choices
N_SAMPLES: Final = 32  # of a probe
PATIENCE: Final = 256  # until the engine must have begun with what was wanted: else it cannot
MAY_LOSE: Final = (
    0.05  # of a step's time, as predicted, by which whole layers alone may be slower and yet are tried
)


class LayerModes:
    """Says which layers shall be whole; told of every step."""

    def __init__(self, board: BoardView, cost: CostModel, tables: LevelTables, *, is_on: bool = True) -> None:
        """Want no whole layer. `is_on`: False: never."""
        self.board, self.cost, self.tables = board, cost, tables
        self.groups = LayoutGroups(board)
        self.stop = StopCost(board.n_layer)
        self.modes = np.zeros(board.n_layer, np.uint8)  # [n_layer] LayerMode, as of the last look
        self.after = np.zeros(board.n_layer, np.int64)  # [n_layer] whole layers that follow
        self.wanted = np.zeros(board.n_layer, bool)  # beside experts that come and go
        self.most = np.zeros(board.n_layer, bool)  # as many as there is room for: nothing else
        self.gain: float | None = (
            None  # of `wanted` against none, as predicted: tokens/s of the layers, less 1
        )
        self.is_plausible = False  # that `most` might be as fast as `wanted`
        self.n_changes = 0
        self._probed: NDArray[np.bool_] | None = None  # while a probe goes on: its layer
        self._left: float = (
            FIRST if is_on and self._n_most().any() else -1
        )  # steps until the next choice; -1: never
        self._can = self.groups.is_split.copy()  # [n_layer] as far as is known
        self._n_late = 0  # steps for which the engine has not begun with something wanted

    @property
    def is_on(self) -> bool:
        """Whether layers may be whole."""
        return self._left >= 0

    @property
    def n_whole(self) -> int:
        """Return how many are."""
        return int(np.count_nonzero(self.modes == LayerMode.WHOLE))

    def look(self) -> bool:
        """Read which layers are whole by now; return whether that has changed."""
        modes = np.array(self.board.whole)
        if np.array_equal(modes, self.modes):
            return False
        self.modes, self.after = modes, n_whole_after(modes, self.groups.is_split)
        return True

    def wanted_in(self, way: str) -> NDArray[np.bool_]:
        """Return [n_layer] what to ask the engine for; way: of the fallback."""
        if way == "whole":
            return self.most
        if way == "split":
            return np.zeros_like(self.wanted)
        return self.wanted if self._probed is None else self._probed

    def can_be_alone(self, *, is_chosen: bool) -> bool:
        """Whether whole layers alone may be as fast as anything else; is_chosen: that was measured."""
        return bool(self.most.any()) and (is_chosen or self.is_plausible)

    def is_in_place(self, way: str) -> bool:
        """Whether the engine has done what that way asks for."""
        return np.array_equal(self.modes == LayerMode.WHOLE, self.wanted_in(way))

    def observe(self, activity: Activity, *, way: str, is_steady: bool, is_full: bool) -> None:
        """Take in a step of that way; is_steady: modes did not change in it; is_full: no slot is free."""
        if not self.is_on or activity.counter("n_forward") == 0:
            return
        if is_steady:
            stats, is_whole = activity.layer_stats, self.modes == LayerMode.WHOLE
            self.stop.observe(stats, self.after, self._busy_us(stats), is_whole)
        is_late = self.wanted_in(way) & (self.modes == LayerMode.SPLIT)
        self._n_late = self._n_late + 1 if is_late.any() else 0
        if self._n_late > PATIENCE:
            self._give_up(is_late)
        elif way == "copies" and self.cost.is_concurrent:  # else there is no stop
            self._advance(is_full)

    def _advance(self, is_full: bool) -> None:
        if self._probed is not None:
            if self.stop.n_samples >= N_SAMPLES:
                self._probed = None
                self._choose()
        elif self.cost.is_host_measured.all() and self.tables.weight > 0:
            # free slots that nobody asks for do not fill
            self._left = max(self._left - (1.0 if is_full else 0.25), 0.0)
            if self._left == 0 and self.stop.saved_us is None:
                self._probe()
            elif self._left == 0:
                self._choose()

    def _give_up(self, is_late: NDArray[np.bool_]) -> None:
        """Want nothing any more of groups whose layers cannot be whole."""
        self._can &= ~np.isin(self.groups.of_layer, self.groups.of_layer[is_late])
        self.wanted, self.most = self.wanted & self._can, self.most & self._can
        self._probed, self.gain, self.is_plausible, self._n_late = None, None, False, 0
        self._left = EVERY if self._can.any() else -1

    def _n_most(self) -> NDArray[np.int64]:
        """Return [n_group] whole layers for which there are slots."""
        return np.asarray(self.groups.slots // max(self.board.n_expert, 1))

    def _layers(self, group: int) -> NDArray[np.intp]:
        layers = np.arange(self.board.n_layer)[self.groups.layers[group]]
        return layers[self._can[layers]]

    def _busy_us(self, stats: NDArray[Any]) -> NDArray[np.float64]:
        """Return [n_layer] what the experts of split layers took."""
        host = stats["host_us"].astype(np.float64)
        if not self.cost.is_concurrent:
            return np.asarray(host + stats["device_us"])
        return np.asarray(np.maximum(host, self.cost.layer_units()[2] * stats["n_device_experts"]))

    def _demand(self) -> Demand:
        load_us, row_us, device_us = self.cost.layer_units()[:, :, None]
        scale = 1.0 / max(self.tables.weight, 1e-9)
        used, rows = scale * self.tables.used, scale * self.tables.rows
        return Demand(scale * self.tables.seen, used * load_us + rows * row_us, used * device_us)

    def _probe(self) -> None:
        """Hold a layer between two split ones: the one before it takes longer by its time."""
        inner = np.flatnonzero(self.groups.is_split)[1:-1]
        n_most = self._n_most()
        self._left = EVERY
        for group in np.argsort(-n_most, kind="stable").tolist():
            layers = np.intersect1d(inner, self._layers(group))
            if len(layers) > 0 and n_most[group] > 0:
                break
        else:
            return
        cost = LayerCost(self.stop.base_us, 0.0, self.cost.is_concurrent)
        found = choose_whole(self._demand(), layers, self._room(group), cost, n_whole=1)
        self._probed = found.is_whole
        self.n_changes += 1

    def _room(self, group: int) -> tuple[int, int]:
        return int(self.groups.slots[group]), self.board.n_expert

    def _choose(self) -> None:
        self._left = EVERY
        demand, saved_us = self._demand(), self.stop.saved_us
        cost = LayerCost(self.stop.base_us, saved_us or 0.0, self.cost.is_concurrent)
        best, most = np.zeros_like(self.wanted), np.zeros_like(self.most)
        us = np.zeros(4)  # of none whole, the present ones, the best ones, as many as fit
        for group in range(self.groups.n_group):
            layers, room = self._layers(group), self._room(group)
            best |= choose_whole(demand, layers, room, cost).is_whole
            most |= choose_whole(demand, layers, room, cost, n_whole=len(layers)).is_whole
            for i, is_whole in enumerate((np.zeros_like(best), self.wanted, best, most)):
                us[i] += time_of(demand, layers, is_whole, room, cost)
        if us[2] < (1.0 - MIN_GAIN) * us[1]:
            self.wanted = best
            self.n_changes += 1
        now_us = min(us[1], us[2]) if self.wanted is best else us[1]
        self.most = most
        self.gain = float(us[0] / now_us) - 1.0
        self.is_plausible = not np.array_equal(most, self.wanted) and bool(us[3] <= (1.0 + MAY_LOSE) * now_us)

    def to_dict(self) -> dict[str, Any]:
        """`whole` of the `--json` object."""
        return {
            "layers": np.flatnonzero(self.modes == LayerMode.WHOLE).tolist(),
            "predicted_gain": self.gain if self.wanted.any() else None,
            "saved_us": self.stop.saved_us,
            "n_changes": self.n_changes,
        }


def whole_text(found: dict[str, Any]) -> str:
    """Say for people what `LayerModes.to_dict` does."""
    gain = found["predicted_gain"]
    return f"{len(found['layers'])}" + ("" if gain is None else f", predicted {gain:.1%} faster than none")
