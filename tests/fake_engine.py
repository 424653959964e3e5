"""A stand-in for libspac on a LocalBoard: takes decisions over as the engine does, copies at once.

Semantics as in engine/include/spac.h: loads below tau are dropped; highest level first, FIFO within a level;
a full layout group gives up its lowest-utility resident below tau, if that is lower than the newcomer's; at
most byte_budget bytes per forward and device, the rest stays queued.
"""

from __future__ import annotations

import numpy as np

from pyspac.engine.board import LocalBoard, Residency


class FakeEngine:
    """Plays the engine on `board`; `evict=False` is the engine's own flag."""

    def __init__(
        self, board: LocalBoard, *, evict: bool = True, host_us: float = 100.0, link_us_per_byte: float = 0.0
    ):
        self.board = board
        self.evict = evict
        self.host_us = host_us  # of one distinct expert
        self.link_us_per_byte = link_us_per_byte
        self.slowness = [1.0] * board.n_device  # of each device's link
        self.queue: list[int] = []  # flat ids, in order of arrival

    def add(self, name: str, value: int) -> None:
        self.board.counters[name] += np.uint64(value)

    def forward(self, counts: np.ndarray) -> None:
        """Take over the decision, then run one forward that activates counts [n_layer, n_expert]."""
        self.apply()
        is_ready = self.board.residency == Residency.RESIDENT
        self.board.counts += counts.astype(np.uint32)
        used = counts > 0
        self.add("n_forward", 1)
        self.add("n_hit", np.count_nonzero(used & is_ready))
        self.add("n_miss", np.count_nonzero(used & ~is_ready))
        self.add("n_hit_rows", int(counts[is_ready].sum()))
        self.add("n_miss_rows", int(counts[~is_ready].sum()))
        self._time_layers(counts, is_ready)

    def _time_layers(self, counts: np.ndarray, is_ready: np.ndarray) -> None:
        stats = self.board.layer_stats
        n_host = np.count_nonzero((counts > 0) & ~is_ready, axis=1)
        stats["n_calls"] += np.uint64(1)
        stats["n_host_experts"] += n_host.astype(np.uint64)
        stats["n_device_experts"] += np.count_nonzero((counts > 0) & is_ready, axis=1).astype(np.uint64)
        stats["n_host_rows"] += (counts * ~is_ready).sum(axis=1).astype(np.uint64)
        stats["n_device_rows"] += (counts * is_ready).sum(axis=1).astype(np.uint64)
        stats["host_us"] += (n_host * self.host_us).astype(np.uint64)
        stats["layer_us"] += (n_host * self.host_us + 50).astype(np.uint64)

    def apply(self) -> None:
        """Take over the board's decision and copy what the budget allows."""
        board = self.board
        self.queue += [int(i) for i in board.load[: int(board.n_load[0])]]
        board.n_load[0] = 0
        self.queue = [i for i in self.queue if self._level(i) >= int(board.tau[i // board.n_expert])]
        self.queue.sort(key=lambda i: -self._level(i))
        budgets = board.byte_budget.tolist()
        waiting, self.queue = self.queue, []
        for i in waiting:
            il = i // board.n_expert
            n_bytes, device = int(board.expert_bytes[il]), int(board.layer_device[il])
            if n_bytes > budgets[device]:
                budgets[device] = 0  # what is behind it waits as well
                self.queue.append(i)
            else:
                budgets[device] -= n_bytes
                self._load(i, n_bytes)

    def _level(self, flat: int) -> int:
        return int(self.board.utility.ravel()[flat])

    def _load(self, flat: int, n_bytes: int) -> None:
        board = self.board
        il, ie = divmod(flat, board.n_expert)
        if board.residency[il, ie] == Residency.RESIDENT or not self._make_room(
            int(board.group[il]), self._level(flat)
        ):
            return
        board.residency[il, ie] = Residency.RESIDENT
        self.add("n_loads", 1)
        self.add("loaded_bytes", n_bytes)
        us = int(n_bytes * self.link_us_per_byte * self.slowness[int(board.layer_device[il])])
        self.add("load_us", us)
        row = board.devices[int(board.layer_device[il]) :][:1]
        for name, value in (("n_loads", 1), ("loaded_bytes", n_bytes), ("load_us", us)):
            row[name] += np.uint64(value)

    def _make_room(self, group: int, level: int) -> bool:
        board = self.board
        layers = np.flatnonzero(board.group == group)
        is_resident = board.residency[layers] == Residency.RESIDENT
        if np.count_nonzero(is_resident) < int(board.group_slots[layers[0]]):
            return True
        levels = np.where(
            is_resident & (board.utility[layers] < board.tau[layers][:, None]),
            board.utility[layers].astype(int),
            999,
        )
        if not self.evict or levels.min() >= level:
            return False
        row, ie = np.unravel_index(np.argmin(levels), levels.shape)
        board.residency[layers[row], ie] = Residency.ABSENT
        self.add("n_evictions", 1)
        return True

    def counter(self, name: str) -> int:
        return int(self.board.counters[name][0])
