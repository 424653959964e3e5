"""The device's slots in the lab: residency, pins, admission and eviction, with the engine's rules.

As in engine/src/cache/expert-cache.cpp: slots are shared within a layout group only; an expert in use by the
running layer is pinned and stays; a victim is resident, never in flight; ties go to the lowest slot. Who
leaves is the eviction policy's decision.
"""

from __future__ import annotations

from typing import ClassVar, Final, Protocol

import numpy as np

from pyspac.engine.board import Residency
from pyspac.lab.books import Books
from pyspac.lab.demand import Bools, Floats, Indices, Keys
from pyspac.lab.events import Evicted, Loaded
from pyspac.lab.trace import TraceGeometry

NONE: Final = -1
# plain integers: an enum's members are slow to look up in a hot loop
ABSENT, QUEUED, LOADING, RESIDENT = (int(state) for state in Residency)


def divide_slots(budget_bytes: int, geometry: TraceGeometry) -> list[int]:
    """Return the slots of each layout group for a budget, exactly as the engine divides it."""
    layers = [(geometry.group[il], size) for il, size in enumerate(geometry.expert_bytes) if size > 0]
    size_of = dict(reversed(layers))  # of the group's first layer
    n_experts = [geometry.n_expert * sum(g == group for g, _ in layers) for group in range(geometry.n_group)]
    sizes = [size_of[group] for group in range(geometry.n_group)]
    total = float(sum(size * n for size, n in zip(sizes, n_experts, strict=True)))
    share = min(1.0, budget_bytes / total)
    slots = [int(share * n + 1e-9) for n in n_experts]
    used = sum(n * size for n, size in zip(slots, sizes, strict=True))
    for i, size in enumerate(sizes):  # what rounding left over goes to the groups in order
        while slots[i] < n_experts[i] and used + size <= budget_bytes:
            slots[i] += 1
            used += size
    return slots


class Choice(Protocol):
    """What the cache asks of an eviction policy."""

    may_bypass: ClassVar[bool]
    is_fixed: ClassVar[bool]

    def on_loaded(self, event: Loaded) -> None:
        """Note that a copy into a slot has completed."""

    def on_evicted(self, event: Evicted) -> None:
        """Note that an expert has left."""

    def may_leave(self, candidates: Keys, newcomer: int | None) -> Bools | None:
        """Return [n] which candidates may make room for a prefetched newcomer; None: all.

        A newcomer of None is one that a predictor expects.
        """

    def victims(self, candidates: Keys, n: int) -> Indices:
        """Return indices of the n candidates that leave, first one first."""


class ExpertCache:
    """Which expert is in which slot. Arrays over all experts are flat: key = il * n_expert + ie."""

    def __init__(self, geometry: TraceGeometry, group_slots: list[int], books: Books) -> None:
        """Start empty; `group_slots` counts the slots of each layout group."""
        n_cell = geometry.n_layer * geometry.n_expert
        self.books = books
        self.n_expert = geometry.n_expert
        self.group_of = np.repeat(np.array(geometry.group, np.intp), geometry.n_expert)  # [n_cell]
        self.bytes_of = np.repeat(np.array(geometry.expert_bytes, np.float64), geometry.n_expert)  # [n_cell]
        self.residency = np.zeros(n_cell, np.uint8)
        self.slot_of = np.full(n_cell, NONE, np.int64)
        self.last_used = np.zeros(n_cell, np.int64)  # forward
        self.share = np.ones(n_cell)  # of its bytes that a resident copy holds: below 1 is low precision
        self.evicted_in = np.full(n_cell, NONE, np.int64)  # step
        self.is_pinned = np.zeros(n_cell, bool)
        self.is_expected = np.zeros(n_cell, bool)  # by a predictor, of a layer that is still to run
        self.promised: set[int] = set()  # that wait for a free slot
        self.n_promised = [0] * len(group_slots)  # free slots that waiting fills will take
        self.owner = [np.full(n, NONE, np.int64) for n in group_slots]  # key per slot
        self.free = [list(range(n - 1, -1, -1)) for n in group_slots]  # the last one is taken first
        self.forward = 0
        self.step = NONE
        self.n_preloaded = 0
        self.n_slots = sum(group_slots)
        self.can_evict = True
        self.has_low_bit = False  # whether any copy ever came in low precision
        self.eviction: Choice  # set by the simulator
        self._pins: list[Keys] = []

    # ---- pins

    def pin(self, keys: Keys) -> None:
        """Keep experts for as long as the running layer lasts."""
        self.is_pinned[keys] = True
        self.last_used[keys] = self.forward
        self._pins.append(keys)

    def unpin_all(self) -> None:
        """Let go: the layer has run."""
        for keys in self._pins:
            self.is_pinned[keys] = False
        self._pins.clear()

    # ---- coming and going

    def preload(self, keys: Keys) -> None:
        """Fill free slots before the first step, at no cost."""
        for key in keys:
            free = self.free[self.group_of[key]]
            if free:
                self._settle(int(key), free.pop())
                self.residency[key] = RESIDENT
                self.n_preloaded += 1

    def admit(self, keys: Keys, share: Floats) -> Bools:
        """Give slots to experts of one layer that were fetched on demand; return [n] which ones were kept.

        `share` [n] is what was copied of their bytes. Those not kept were only used: no slot could be freed
        for them, the policy bypasses, or what is resident is fixed.
        """
        kept = np.zeros(len(keys), bool) if self.eviction.is_fixed else self._find_slots(keys)
        self.share[keys[kept]] = share[kept]
        for key in keys[kept].tolist():
            self.eviction.on_loaded(Loaded(self.step, key, float(self.share[key])))
        return kept

    def _find_slots(self, keys: Keys) -> Bools:
        """Settle as many as possible; return [n] which ones have a slot."""
        kept = np.ones(len(keys), bool)
        free = self.free[self.group_of[keys[0]]]
        n_missing_slots = len(keys) - len(free)
        if n_missing_slots > 0:
            newcomers = set(keys.tolist()) if self.eviction.may_bypass else set()
            for key in self._leaving(keys, n_missing_slots).tolist():
                if key in newcomers:
                    kept[keys == key] = False
                else:
                    free.append(self._evict(key))
            kept[np.flatnonzero(kept)[len(free) :]] = False
        for key in keys[kept].tolist():
            self._settle(key, free.pop())
        self.residency[keys[kept]] = RESIDENT
        return kept

    def _leaving(self, keys: Keys, n: int) -> Keys:
        """Return up to n experts that go; may contain newcomers if the policy bypasses."""
        if not self.can_evict:
            return np.zeros(0, np.intp)
        candidates = self._candidates(int(self.group_of[keys[0]]), ignores_pins=self.eviction.may_bypass)
        if self.eviction.may_bypass:
            candidates = np.concatenate([candidates, keys])
        if len(candidates) == 0:
            return candidates
        return candidates[self.eviction.victims(candidates, min(n, len(candidates)))]

    def _candidates(self, group: int, *, ignores_pins: bool = False) -> Keys:
        """Return the residents of a group that are not in use, by slot."""
        owner = self.owner[group]
        if self.free[group]:
            owner = owner[owner >= 0]
        is_there = self.residency[owner] == RESIDENT
        if not ignores_pins:
            is_there &= ~self.is_pinned[owner]
        return np.asarray(owner[is_there], np.intp)

    def claim(self, key: int, *, is_ahead: bool = False) -> bool:
        """Take a slot for a copy that begins now; False if no resident may leave for it.

        is_ahead: a predictor expects it, so it may replace any expert that is not wanted.
        """
        group = int(self.group_of[key])
        if self.free[group]:
            slot = self.free[group].pop()
        else:
            victim = self._victim_for(None if is_ahead else key, group)
            if victim is None:
                return False
            slot = self._evict(victim)
        self._settle(key, slot)
        self.residency[key] = LOADING
        return True

    def promise(self, keys: Keys, n_held_max: int) -> Keys:
        """Promise free slots to absent experts of one layer, in their order; return those that got one.

        n_held_max: of the layer's experts that hold or await a slot.
        """
        group, first = int(self.group_of[keys[0]]), int(keys[0]) // self.n_expert * self.n_expert
        room = len(self.free[group]) - self.n_promised[group]
        if room <= 0:
            return keys[:0]
        n_held = int(np.count_nonzero(self.residency[first : first + self.n_expert] != ABSENT))
        absent = keys[self.residency[keys] == ABSENT]
        got: Keys = absent[: max(min(room, n_held_max - n_held), 0)]
        self.residency[got] = QUEUED
        self.n_promised[group] += len(got)
        self.promised.update(got.tolist())
        return got

    def claim_promised(self, key: int) -> bool:
        """Take the slot that was promised; False if others took it meanwhile."""
        group = int(self.group_of[key])
        self.n_promised[group] -= 1
        if key not in self.promised:  # a predictor had it copied meanwhile
            return False
        self.promised.remove(key)
        self.residency[key] = ABSENT
        return bool(self.free[group]) and self.claim(key)

    def _victim_for(self, key: int | None, group: int) -> int | None:
        if not self.can_evict:
            return None
        candidates = self._candidates(group)
        candidates = candidates[~self.is_expected[candidates]]
        allowed = self.eviction.may_leave(candidates, key) if len(candidates) else None
        if allowed is not None:
            candidates = candidates[allowed]
        if len(candidates) == 0:
            return None
        return int(candidates[self.eviction.victims(candidates, 1)[0]])

    def publish(self, key: int) -> None:
        """Make a completed copy usable."""
        self.residency[key] = RESIDENT
        self.last_used[key] = self.forward
        self.eviction.on_loaded(Loaded(self.step, key))

    def _settle(self, key: int, slot: int) -> None:
        self.slot_of[key] = slot
        self.owner[self.group_of[key]][slot] = key
        self.share[key] = 1.0

    def _evict(self, key: int) -> int:
        slot = int(self.slot_of[key])
        self.slot_of[key] = NONE
        self.owner[self.group_of[key]][slot] = NONE
        self.residency[key] = ABSENT
        self.evicted_in[key] = self.step
        self.books.evictions += 1
        self.eviction.on_evicted(Evicted(self.step, key))
        return slot

    # ---- questions

    def is_resident(self, keys: Keys) -> Bools:
        """Return [n] which experts may be computed on the device now."""
        return np.asarray(self.residency[keys] == RESIDENT)

    def count(self, state: int) -> int:
        """Return how many experts are in a state."""
        return int(np.count_nonzero(self.residency == state))
