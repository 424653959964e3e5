"""Which layers the device holds whole, and which share the other slots expert by expert: a pure choice.

A split layer costs a stop: its ids come to the host and go back, and so do the rows of absent experts. A
whole layer costs n_expert slots, most of which are of little use. Per layer, of what a step uses by level:

    T_split = base + max(host(u), device(u))        the slots left cover the levels from the highest down
    T_whole = base - saved

`base` and `saved` are measured: a layer takes longer by the time of a whole one that follows it (`StopCost`).
Where nothing is known of it yet, one layer is held whole for a while to see.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pyspac.engine.board import LayerMode
from pyspac.scheduler.contest import FAR

_REMEMBER: Final = 0.95  # per step: what is left of the past in the measured times
_N_FIRST: Final = 8  # times of a layer before they are believed
_N_KEPT: Final = 64  # steps whose median says what is saved
MIN_GAIN: Final = (
    0.03  # of a step's layers, that a change must gain: it moves many experts, and rebuilds the graph
)


class Demand(NamedTuple):
    """What a step uses by level of utility, from the highest down: each [n_layer, n_levels + 1]."""

    n_experts: NDArray[np.float64]
    host_us: NDArray[np.float64]  # if the host computes all of that level
    device_us: NDArray[np.float64]  # if the device does


class LayerCost(NamedTuple):
    """Microseconds of a layer beside its experts."""

    base_us: float  # split
    saved_us: float  # of it, and of its device experts, that a whole layer saves
    is_concurrent: bool = True  # whether host and device compute at once


@dataclass(frozen=True, slots=True)
class Choice:
    """Layers to hold whole, and a step's time of all layers as predicted."""

    is_whole: NDArray[np.bool_]  # [n_layer]
    us: float


def predict_us(
    demand: Demand, layers: NDArray[np.intp], n_slots: int, cost: LayerCost
) -> NDArray[np.float64]:
    """Return [len(layers)] the times of split layers that share n_slots by utility."""
    n = demand.n_experts[layers].sum(axis=0)
    before = np.cumsum(n) - n  # experts of higher levels
    covered = np.clip((n_slots - before) / np.maximum(n, 1e-9), 0.0, 1.0)
    host = demand.host_us[layers] @ (1.0 - covered)
    device = demand.device_us[layers] @ covered
    return np.asarray(cost.base_us + (np.maximum(host, device) if cost.is_concurrent else host + device))


def time_of(
    demand: Demand,
    layers: NDArray[np.intp],
    is_whole: NDArray[np.bool_],
    slots: tuple[int, int],
    cost: LayerCost,
) -> float:
    """Return a step's microseconds in the layers of a layout group; slots: of the group, of a whole layer."""
    split = layers[~is_whole[layers]]
    n_whole = len(layers) - len(split)
    n_left = slots[0] - n_whole * slots[1]
    split_us = float(predict_us(demand, split, n_left, cost).sum()) if len(split) else 0.0
    return split_us + n_whole * (cost.base_us - cost.saved_us)


def choose_whole(
    demand: Demand,
    layers: NDArray[np.intp],
    slots: tuple[int, int],
    cost: LayerCost,
    *,
    n_whole: int | None = None,
) -> Choice:
    """Return the best layers of a layout group to hold whole; with `n_whole`, so many of them.

    One after the other, that first whose experts cost the host most for the slots that it takes from the
    others; slots: of the group, and of a whole layer. O(n_layer ** 2 * n_levels).
    """
    n_slots, n_expert = slots
    is_whole = np.zeros(len(demand.n_experts), bool)
    best = Choice(is_whole.copy(), time_of(demand, layers, is_whole, slots, cost))
    n_most = min(len(layers), n_slots // n_expert)
    for n in range(1, (n_most if n_whole is None else min(n_whole, n_most)) + 1):
        split = layers[~is_whole[layers]]
        is_whole[_next(demand, split, n_slots - (n - 1) * n_expert)] = True
        found = Choice(is_whole.copy(), time_of(demand, layers, is_whole, slots, cost))
        if n_whole is not None or found.us < best.us:
            best = found
    return best


def _next(demand: Demand, split: NDArray[np.intp], n_slots: int) -> int:
    """Return of these layers the one that gains most from being whole: least from sharing slots."""
    n, host = demand.n_experts[split], demand.host_us[split]
    total = n.sum(axis=0)
    before = np.cumsum(total) - total
    covered = np.clip((n_slots - before) / np.maximum(total, 1e-9), 0.0, 1.0)
    cut = min(
        int(np.searchsorted(np.cumsum(total), n_slots)), len(total) - 1
    )  # the level where slots run out
    price = float(host[:, cut].sum()) / max(float(total[cut]), 1e-9)  # of a slot there
    return int(split[np.argmax(host @ (1.0 - covered) + price * (n @ covered))])


def n_whole_after(modes: NDArray[np.uint8], is_ours: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return [n_layer] how many whole layers follow each split one before the next; 0 for whole ones.

    modes: [n_layer] LayerMode; is_ours: [n_layer] layers that can be split at all.
    """
    is_whole = (modes == LayerMode.WHOLE) & is_ours
    after = np.zeros(len(modes), np.int64)
    splits = np.flatnonzero(is_ours & ~is_whole)
    n_before = np.cumsum(is_whole)
    ends = np.append(splits[1:], len(modes) - 1)
    after[splits] = n_before[ends] - n_before[splits]
    return after


class StopCost:
    """Measures what split layers take beside their experts, and what a whole one saves.

    Layers differ, and machines have accidents: a layer is compared with itself, and medians decide.
    """

    def __init__(self, n_layer: int) -> None:
        """Nothing is known."""
        self._base = np.zeros(n_layer)  # microseconds of each layer, of times when none was whole
        self._pace = 1.0  # how much longer the split ones take now
        self._n_base = np.zeros(n_layer, np.int64)
        self._saved: deque[float] = deque(maxlen=_N_KEPT)  # of the last steps with whole layers
        self.n_samples = 0  # such steps

    @property
    def base_us(self) -> float:
        """Return it per layer; 0 before the first step."""
        return self._pace * float(np.median(self._base[self._n_base > 0])) if self._n_base.any() else 0.0

    @property
    def saved_us(self) -> float | None:
        """Return it per whole layer; None before there was one. Never more than `base_us`."""
        return min(self._pace * float(np.median(self._saved)), self.base_us) if self._saved else None

    def observe(
        self,
        stats: NDArray[Any],
        after: NDArray[np.int64],
        busy_us: NDArray[np.float64],
        is_whole: NDArray[np.bool_],
    ) -> None:
        """Take in a step: LAYER_STATS_DTYPE, `n_whole_after`, what the experts took; each [n_layer].

        The last layer of a forward has no time.
        """
        us, n_calls = stats["layer_us"].astype(np.float64), stats["n_calls"].astype(np.float64)
        is_timed = (us > 0) & (n_calls > 0)
        rest = np.maximum(us - busy_us, 0.0) / np.maximum(n_calls, 1.0)
        plain, followed = is_timed & (after == 0), is_timed & (after > 0)
        known = plain & (self._n_base >= _N_FIRST)
        if not is_whole.any():
            self._pace = 1.0
            self._learn_base(rest, plain)
        elif followed.any() and known.any():
            pace = float(np.median(rest[known] / np.maximum(self._base[known], 1e-9)))  # of this step
            self._pace += (1.0 - _REMEMBER) * (min(pace, FAR) - self._pace)
            self._saved.append(self._saving(rest / max(pace, 1e-9), after, followed, is_whole))
            self.n_samples += 1

    def _saving(
        self,
        rest: NDArray[np.float64],
        after: NDArray[np.int64],
        followed: NDArray[np.bool_],
        is_whole: NDArray[np.bool_],
    ) -> float:
        """What the whole layers would take if they were split, less what they take, per layer."""
        base = np.where(self._n_base > 0, self._base, self.base_us / self._pace)
        total = np.cumsum(np.where(is_whole, base, 0.0))
        first = np.flatnonzero(followed)
        ends = [il + int(np.flatnonzero(is_whole[il + 1 :])[after[il] - 1]) + 1 for il in first]
        expected = base[first] + total[ends] - total[first]
        return float((expected - rest[first]).sum() / after[first].sum())

    def _learn_base(self, rest: NDArray[np.float64], plain: NDArray[np.bool_]) -> None:
        is_believed = np.where(self._n_base >= _N_FIRST, np.minimum(rest, FAR * self._base), rest)
        weight = np.maximum(1.0 / (1.0 + self._n_base), 1.0 - _REMEMBER)[plain]
        self._base[plain] += weight * (is_believed - self._base)[plain]
        self._n_base[plain] += 1
