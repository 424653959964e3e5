"""Which layers the devices shall hold whole: measures, asks `whole_layers`, and changes its mind rarely.

    wait -> probe -> choose -> wait -> choose ...

A probe holds one layer of each device whole, to see what a stop costs there. Then the choice stands until
another one is better for sure; each change copies layers' experts, within the byte budget, and rebuilds the
graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pyspac.engine.board import Board, LayerMode
from pyspac.engine.layout_groups import LayoutGroups
from pyspac.scheduler.activations import Activity
from pyspac.scheduler.balancer import LevelTables
from pyspac.scheduler.cost_model import CostModel
from pyspac.scheduler.stop_cost import StopCosts, n_whole_after
from pyspac.scheduler.whole_layers import MIN_GAIN, Demand, Room, choose_whole, time_of

# in steps of a full device
FIRST: Final = 64  # until demand is known: twice what ema remembers
EVERY: Final = 1024  # between choices
RECENT: Final = 256  # before a choice, whose times are looked at
N_TOGETHER: Final = 4  # whose times are taken in as one: what a stop costs changes slowly
N_SAMPLES: Final = 8  # of so many steps: of a probe, of each device
PATIENCE: Final = 256  # until the engine must have begun with what was wanted: else it cannot
MAY_LOSE: Final = (
    0.05  # of a step's time, as predicted, by which only whole layers may be slower and yet are tried
)

_WHOLE: Final = int(LayerMode.WHOLE)  # plain integers: numpy compares with an enum's in 64 bits
_SPLIT: Final = int(LayerMode.SPLIT)


@dataclass(slots=True)
class PredictedTimes:
    """A step's microseconds in all layers, by which ones are whole."""

    none: float = 0.0
    present: float = 0.0  # those that were wanted so far
    best: float = 0.0
    most: float = 0.0  # as many as fit


class LayerModes:
    """Says which layers shall be whole; told of every step."""

    def __init__(self, board: Board, cost: CostModel, tables: LevelTables, *, is_on: bool = True) -> None:
        """Want no whole layer. `is_on`: False: never."""
        self.board, self.cost, self.tables = board, cost, tables
        self.groups = LayoutGroups(board)
        self.stops = StopCosts(self.groups.device_of_layer, self.groups.n_device)
        self.modes = np.zeros(board.n_layer, np.uint8)  # [n_layer] LayerMode, as of the last look
        self.is_whole = np.zeros(board.n_layer, bool)  # [n_layer] by them
        self.n_whole = 0
        self.is_split = ~self.is_whole  # the others but those that become whole
        self.after = np.zeros(board.n_layer, np.int64)  # [n_layer] whole layers that follow
        self.wanted = np.zeros(board.n_layer, bool)  # beside experts that come and go
        self.most = np.zeros(board.n_layer, bool)  # as many as there is room for: nothing else
        self.gain: float | None = (
            None  # of `wanted` against none, as predicted: tokens/s of the layers, less 1
        )
        self.is_plausible = False  # that `most` might be as fast as `wanted`
        self.n_changes = 0
        self._none = np.zeros(board.n_layer, bool)
        self._seen = self.modes.tobytes()  # of the last look: compared in a tenth of the time of arrays
        self._probed: NDArray[np.bool_] | None = None  # while a probe goes on: its layers,
        self._probed_devices: list[int] = []  # and whose they are
        self._until_choice: float | None = (
            float(FIRST) if is_on and self._n_most().any() else None  # steps; None: there will be none
        )
        self._can = self.groups.is_split.copy()  # [n_layer] as far as is known
        self._n_late = 0  # steps for which the engine has not begun with something wanted
        # spac_layer_stats as plain numbers: of steps in which modes did not change
        self._sums = np.zeros_like(board.layer_stats).view(np.uint64)
        self._n_summed = 0

    @property
    def is_on(self) -> bool:
        """Whether layers may be whole."""
        return self._until_choice is not None

    def look(self) -> bool:
        """Read which layers are whole by now; return whether that has changed."""
        seen = self.board.whole.tobytes()
        if seen == self._seen:
            return False
        self._seen, self.modes = seen, np.frombuffer(seen, np.uint8)
        self.is_whole = self.modes == _WHOLE
        self.n_whole = int(np.count_nonzero(self.is_whole))
        self.is_split = self.modes == _SPLIT
        self.after = n_whole_after(self.is_whole, self.groups.is_split)
        return True

    def wanted_in(self, way: str) -> NDArray[np.bool_]:
        """Return [n_layer] what to ask the engine for; way: of the fallback."""
        if way == "whole":
            return self.most
        if way == "split":
            return self._none
        return self.wanted if self._probed is None else self._probed

    @property
    def has_wanted(self) -> bool:
        """Whether any layer shall be whole beside experts that come and go."""
        return bool(np.count_nonzero(self.wanted))

    def can_be_only_whole(self, *, is_chosen: bool) -> bool:
        """Whether only whole layers may be as fast as anything else; is_chosen: that was measured."""
        return (is_chosen or self.is_plausible) and bool(np.count_nonzero(self.most))

    def is_in_place(self, way: str) -> bool:
        """Whether the engine has done what that way asks for."""
        return self.is_whole.tobytes() == self.wanted_in(way).tobytes()

    def observe(self, activity: Activity, *, way: str, is_steady: bool, is_full: bool) -> None:
        """Take in a step of that way; is_steady: modes did not change in it; is_full: no slot is free."""
        if self._until_choice is None or activity.counter("n_forward") == 0:
            return
        is_of_use = self._probed is not None or self._until_choice <= RECENT
        self._observe_times(activity.layer_stats, is_of_use=is_of_use and is_steady)
        is_late = self.wanted_in(way) & self.is_split
        self._n_late = self._n_late + 1 if np.count_nonzero(is_late) else 0
        if self._n_late > PATIENCE:
            self._give_up(is_late)
        elif way == "copies" and self.cost.is_concurrent:  # else there is no stop
            self._advance(self._until_choice, is_full)

    def _observe_times(self, stats: NDArray[Any], *, is_of_use: bool) -> None:
        if not is_of_use:
            self._forget_times()
            return
        self._sums += stats.view(np.uint64)
        self._n_summed += 1
        if self._n_summed == N_TOGETHER:
            sums = self._sums.view(self.board.layer_stats.dtype)
            self.stops.observe(sums, self.after, self._busy_us(sums), self.is_whole)
            self._forget_times()

    def _forget_times(self) -> None:
        if self._n_summed > 0:
            self._sums[:], self._n_summed = 0, 0

    def _advance(self, until_choice: float, is_full: bool) -> None:
        if self._probed is not None:
            if self._has_shown():
                self._probed = None
                self._choose()
        elif self.tables.weight > 0 and self.cost.is_host_measured.all():
            # free slots without demand do not fill
            self._until_choice = max(until_choice - (1.0 if is_full else 0.25), 0.0)
            if self._until_choice == 0 and self.stops.together.saved_us is None:
                self._probe()
            elif self._until_choice == 0:
                self._choose()

    def _has_shown(self) -> bool:
        """Whether every device of a probe was seen often enough; a slow one is not waited for for ever."""
        n_samples = min(self.stops.of(device).n_samples for device in self._probed_devices)
        return n_samples >= N_SAMPLES or N_TOGETHER * self.stops.together.n_samples >= PATIENCE

    def _give_up(self, is_late: NDArray[np.bool_]) -> None:
        """Want nothing any more of groups whose layers cannot be whole."""
        cannot = np.bincount(self.groups.of_layer[is_late], minlength=self.groups.n_group) > 0  # [n_group]
        self._can &= ~cannot[self.groups.of_layer]
        self.wanted, self.most = self.wanted & self._can, self.most & self._can
        self._probed, self.gain, self.is_plausible, self._n_late = None, None, False, 0
        self._until_choice = float(EVERY) if self._can.any() else None

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
        """Hold a layer of each device: the one before it takes longer by its time."""
        self._until_choice = float(EVERY)
        probed = np.zeros_like(self.wanted)
        self._probed_devices = []
        for device in range(self.groups.n_device):
            layer = self._layer_to_probe(device)
            if layer.any():
                probed |= layer
                self._probed_devices.append(device)
        if self._probed_devices:
            self._probed = probed
            self.n_changes += 1

    def _layer_to_probe(self, device: int) -> NDArray[np.bool_]:
        """Return [n_layer] one of the device's between two split ones, behind one of its own if it can be."""
        inner = np.zeros_like(self.wanted)
        inner[np.flatnonzero(self.groups.is_split)[1:-1]] = True
        first = np.flatnonzero(self.groups.is_split & (self.groups.device_of_layer == device))[:1]
        cost = self.stops.layer_cost(device, is_concurrent=self.cost.is_concurrent)
        for group in np.argsort(-self._n_most(), kind="stable").tolist():
            if self.groups.device[group] != device:
                continue
            layers = self._layers(group)
            layers = layers[inner[layers]]
            if len(layers) > 1:  # else it shows what it can together with others
                layers = layers[layers != first]
            room = self._room(group)
            if len(layers) > 0 and room.n_slots >= room.n_expert:
                return choose_whole(self._demand(), layers, room, cost, n_whole=1).is_whole
        return self._none

    def _room(self, group: int) -> Room:
        return Room(int(self.groups.slots[group]), self.board.n_expert)

    def _choose(self) -> None:
        self._until_choice = float(EVERY)
        demand = self._demand()
        best, most = np.zeros_like(self.wanted), np.zeros_like(self.most)
        us = PredictedTimes()
        for group, device in enumerate(self.groups.device.tolist()):
            layers, room = self._layers(group), self._room(group)
            cost = self.stops.layer_cost(device, is_concurrent=self.cost.is_concurrent)
            best |= choose_whole(demand, layers, room, cost).is_whole
            most |= choose_whole(demand, layers, room, cost, n_whole=len(layers)).is_whole
            us.none += time_of(demand, layers, self._none, room, cost)
            us.present += time_of(demand, layers, self.wanted, room, cost)
            us.best += time_of(demand, layers, best, room, cost)
            us.most += time_of(demand, layers, most, room, cost)
        if us.best < (1.0 - MIN_GAIN) * us.present:
            self.wanted = best
            self.n_changes += 1
            us.present = us.best
        self.most = most
        self.gain = us.none / us.present - 1.0
        may_win = us.most <= (1.0 + MAY_LOSE) * us.present
        self.is_plausible = may_win and not np.array_equal(most, self.wanted)

    def to_dict(self) -> dict[str, Any]:
        """`whole` of the `--json` object."""
        return {
            "layers": np.flatnonzero(self.is_whole).tolist(),
            "predicted_gain": self.gain if self.has_wanted else None,
            "saved_us": [self.stops.saved_us(device) for device in range(self.groups.n_device)],
            "n_changes": self.n_changes,
        }


def whole_text(found: dict[str, Any]) -> str:
    """Say for people what `LayerModes.to_dict` does."""
    gain = found["predicted_gain"]
    return f"{len(found['layers'])}" + ("" if gain is None else f", predicted {gain:.1%} faster than none")
