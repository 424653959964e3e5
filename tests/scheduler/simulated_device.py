"""Devices and their engine with a simulated clock: layers split or whole, stops that take time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from pyspac.engine.board import BoardGeometry, LayerMode, LocalBoard, Residency
from pyspac.engine.step import StepRecord

N_LAYER, N_EXPERT, N_USED = 24, 32, 4
HOST_US, ROW_US, DEVICE_US, REST_US = (
    30.0,
    3.0,
    4.0,
    60.0,
)  # of an expert, a row, an expert; of a layer beside


class SimulatedDevice:
    """Takes decisions over from `board`, copies at once, and says what a step took.

    Demand is skewed, in each layer more or less. `stop_us`: of one device, or of several, which share the
    layers, and have slots of their own.
    """

    def __init__(self, cache: float, stop_us: float | Sequence[float], seed: int = 0) -> None:
        stops = [stop_us] if isinstance(stop_us, float) else stop_us
        n_device = len(stops)
        self.device = np.arange(N_LAYER) * n_device // N_LAYER  # [n_layer]
        n_slots = round(cache * N_LAYER * N_EXPERT / n_device)
        geometry = BoardGeometry(
            n_layer=N_LAYER, n_expert=N_EXPERT, n_expert_used=N_USED, expert_bytes=[1000] * N_LAYER,
            group=self.device.tolist(), group_slots=[n_slots] * N_LAYER, layer_device=self.device.tolist(),
        )  # fmt: skip
        self.board = LocalBoard(geometry)
        self.stop_us = np.array(stops)[self.device]  # [n_layer]
        self.can_be_whole = True
        self.is_never_filled = np.zeros(n_device, bool)  # devices whose links are too slow for whole layers
        self.rng = np.random.default_rng(seed)
        skew = self.rng.uniform(0.2, 1.4, N_LAYER)
        order = np.array([self.rng.permutation(N_EXPERT) for _ in range(N_LAYER)])
        weights = (1.0 + order) ** -skew[:, None]
        self.log_weights = np.log(weights / weights.sum(axis=1, keepdims=True))
        self.n_steps = 0

    def step(self) -> float:
        """One step of one token: microseconds."""
        self._apply()
        noise = self.rng.gumbel(size=(N_LAYER, N_EXPERT))  # the largest are a draw without replacement
        used = np.zeros((N_LAYER, N_EXPERT), bool)
        chosen = np.argpartition(-(self.log_weights + noise), N_USED, axis=1)[:, :N_USED]
        np.put_along_axis(used, chosen, True, axis=1)
        us = self._compute(used)
        record = StepRecord(step=self.n_steps, n_draft=0, verify_us=round(us))
        self.board.record_step(record)
        self.n_steps += 1
        return us

    def _compute(self, used: np.ndarray) -> float:
        board = self.board
        is_whole = board.whole == LayerMode.WHOLE
        n_device = np.count_nonzero(used & (board.residency == Residency.RESIDENT), axis=1)
        n_host = N_USED - n_device
        host_us = n_host * (HOST_US + ROW_US)
        split_us = REST_US + self.stop_us + np.maximum(host_us, n_device * DEVICE_US)
        whole_us = REST_US + N_USED * DEVICE_US
        us = np.where(is_whole, whole_us, split_us) * self.rng.normal(1.0, 0.05, N_LAYER).clip(0.8, 1.2)
        stats, splits = board.layer_stats, np.flatnonzero(~is_whole)
        for name, values in {
            "n_calls": np.ones(N_LAYER), "n_device_experts": n_device, "n_host_experts": n_host,
            "n_device_rows": n_device, "n_host_rows": n_host, "host_us": host_us,
        }.items():  # fmt: skip
            stats[name][splits] += values[splits].astype(np.uint64)
        for il, following in pairwise(splits):
            stats["layer_us"][il] += np.uint64(us[il:following].sum())
        board.counts[splits] += used[splits].astype(np.uint32)
        board.counters["n_forward"] += np.uint64(1)
        return float(us.sum())

    def _apply(self) -> None:
        board = self.board
        loads = np.zeros(N_LAYER * N_EXPERT, bool)
        loads[board.load[: int(board.n_load[0])]] = True
        for device in range(board.n_device):
            layers = np.flatnonzero(self.device == device)
            self._apply_to(device, layers, loads.reshape(N_LAYER, N_EXPERT)[layers])
        board.counters["n_loads"] = board.devices["n_loads"].sum()
        board.counters["loaded_bytes"] = board.devices["loaded_bytes"].sum()
        board.counters["load_us"] = board.devices["load_us"].sum()

    def _apply_to(self, device: int, layers: np.ndarray, loads: np.ndarray) -> None:
        """Of one device; loads: [len(layers), n_expert]."""
        board, n_slots = self.board, int(self.board.group_slots[layers[0]])
        may_copy = bool(board.byte_budget[device] > 0)
        whole, was_resident = board.whole[layers], board.residency[layers] == Residency.RESIDENT
        wanted = (board.want_whole[layers] > 0) & self.can_be_whole
        wanted[np.flatnonzero(wanted)[n_slots // N_EXPERT :]] = False
        was_resident[(whole == LayerMode.WHOLE) & ~wanted] = False
        has_begun = wanted & (whole != LayerMode.SPLIT) & ~self.is_never_filled[device]
        wanted = wanted if may_copy else has_begun
        board.whole[layers] = np.where(has_begun, LayerMode.WHOLE, np.where(wanted, LayerMode.FILLING, 0))
        n_left = n_slots - N_EXPERT * int(np.count_nonzero(wanted))
        free = ~wanted[:, None] & (board.utility[layers] >= board.tau[layers][:, None])
        is_held = was_resident | (loads & free & may_copy)
        is_held[wanted] = False
        value = np.where(is_held, 1.0 + board.utility[layers], 0.0)
        value += 0.5 * was_resident  # who is there stays among equals
        kept = np.argsort(-value.ravel(), kind="stable")[:n_left]
        resident = np.zeros(is_held.size, bool)
        resident[kept] = is_held.ravel()[kept]
        resident = resident.reshape(is_held.shape)
        resident[wanted] = True
        n_new = int(np.count_nonzero(resident & ~was_resident))
        board.residency[layers] = np.where(resident, Residency.RESIDENT, Residency.ABSENT)
        for name, value_of_one in {"n_loads": 1, "loaded_bytes": 1000, "load_us": 1}.items():
            board.devices[name][device] += np.uint64(value_of_one * n_new)
        assert np.count_nonzero(resident) <= n_slots
