"""Which layers the device holds whole, and which share the other slots expert by expert: a pure choice.

A split layer costs a stop: its ids come to the host and go back, and so do the rows of absent experts. A
whole layer costs n_expert slots, most of which are of little use. Per layer, of what a step uses by level:

    T_split = base + max(host(u), device(u))        the slots left cover the levels from the highest down
    T_whole = base - saved

`base` and `saved` are measured, of each device (`stop_cost.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

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


class Room(NamedTuple):
    """Slots."""

    n_slots: int  # of the layout group
    n_expert: int  # that a whole layer takes


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
    room: Room,
    cost: LayerCost,
) -> float:
    """Return a step's microseconds in the layers of a layout group."""
    split = layers[~is_whole[layers]]
    n_whole = len(layers) - len(split)
    n_left = room.n_slots - n_whole * room.n_expert
    split_us = float(predict_us(demand, split, n_left, cost).sum()) if len(split) else 0.0
    return split_us + n_whole * (cost.base_us - cost.saved_us)


def choose_whole(
    demand: Demand,
    layers: NDArray[np.intp],
    room: Room,
    cost: LayerCost,
    *,
    n_whole: int | None = None,
) -> Choice:
    """Return the best layers of a layout group to hold whole; with `n_whole`, so many of them.

    One after the other, that first whose experts cost the host most for the slots that it takes from the
    others. O(n_layer ** 2 * n_levels).
    """
    is_whole = np.zeros(len(demand.n_experts), bool)
    best = Choice(is_whole.copy(), time_of(demand, layers, is_whole, room, cost))
    n_most = min(len(layers), room.n_slots // room.n_expert)
    for n in range(1, (n_most if n_whole is None else min(n_whole, n_most)) + 1):
        split = layers[~is_whole[layers]]
        is_whole[_next(demand, split, room.n_slots - (n - 1) * room.n_expert)] = True
        found = Choice(is_whole.copy(), time_of(demand, layers, is_whole, room, cost))
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
