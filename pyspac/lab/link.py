"""The link between host and device: one copy at a time, a queue by level, first in first out within a level.

Copies on demand go before the queue, after the one in flight. A queued copy claims its slot when it begins
(as the engine does), so a victim stays useful until then.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pyspac.engine.board import NO_BUDGET
from pyspac.lab.cache import ABSENT, LOADING, QUEUED, RESIDENT, ExpertCache
from pyspac.lab.demand import Demand, Floats, Keys
from pyspac.lab.machine import Machine


class Expecting(Protocol):
    """Who expects an expert, and hears what became of the copy."""

    def note_copied(self, key: int) -> None:
        """It has arrived."""

    def note_dropped(self) -> None:
        """It was given up."""


class Link:
    """Copies in time, in microseconds since the start."""

    def __init__(self, machine: Machine, cache: ExpertCache) -> None:
        """Start idle."""
        self.machine = machine
        self.cache = cache
        self.books = cache.books
        self.free_at = 0.0  # when the copy in flight ends
        self.in_flight = -1
        self.queue: list[tuple[int, int, int]] = []  # heap of (-level, number, key)
        self.waiting: dict[int, int] = {}  # key: number of its valid entry
        self.fills: list[tuple[int, int, int]] = []  # heap of (-level, number, key): promised free slots
        self.ahead: deque[tuple[int, Expecting]] = deque()  # expected, and to be copied before all else
        self._expecting: Expecting | None = None  # who expects the copy in flight
        self.queued_us = 0.0  # link time of the queue, about
        self.byte_budget = NO_BUDGET  # per forward
        self.credit = float("inf")  # bytes that may still begin in this forward
        self._largest = float(cache.bytes_of.max())
        self._number = 0
        self._idle_since = 0.0
        self._held_until = 0.0

    def hold(self, until: float) -> None:
        """Begin no copy before then."""
        self._held_until = max(self._held_until, until)

    # ---- the queue

    def submit(self, copies: list[tuple[int, int]], now: float) -> None:
        """Queue copies (key, level) of absent experts; a free link begins with the best of them at once."""
        self.advance(now)
        for key, level in copies:
            if self.cache.residency[key] == ABSENT:
                self._push(key, level)
                self.cache.residency[key] = QUEUED
        self.advance(now)

    def fill(self, demand: Demand, levels: npt.NDArray[np.integer], n_held_max: int, now: float) -> None:
        """Copy what was just used into free slots while nothing of the queue can begin.

        As spac_expert_cache::fill: outside the byte budget, and without evicting. levels: [n] who comes
        first, up to the next decision (`reorder_fills`); n_held_max: of the layer's experts that hold or
        await a slot.
        """
        order = np.argsort(-demand.rows, kind="stable")
        level_of = dict(zip(demand.keys.tolist(), levels.tolist(), strict=True))
        for key in self.cache.promise(demand.keys[order], n_held_max).tolist():
            self._number += 1
            heapq.heappush(self.fills, (-level_of[key], self._number, key))
        self.advance(now)

    def reorder_fills(self, utility: npt.NDArray[np.uint8]) -> None:
        """Let promised free slots be taken by utility [n_cell]; equals stay in their order."""
        order = [key for _, _, key in sorted(self.fills)]
        self.fills = [(-int(utility[key]), number, key) for number, key in enumerate(order, self._number + 1)]
        self._number += len(order)
        heapq.heapify(self.fills)

    def expect(self, keys: Keys, time_us: float | None, now: float, who: Expecting) -> tuple[int, list[int]]:
        """Keep experts of one layer that runs in time_us, and copy the absent ones before all else.

        time_us None: copy nothing. As spac_expert_cache::expect: only so many as are sure to be there in
        time, behind what waits, and within the byte budget beside it. Return how many are queued, and which
        were cut.
        """
        self.advance(now)
        cache, size = self.cache, float(self.cache.bytes_of[keys[0]])
        cache.is_expected[keys] = True
        waiting = {key for key, _ in self.ahead}
        is_there = np.isin(cache.residency[keys], (LOADING, RESIDENT))
        absent = [key for key in keys[~is_there].tolist() if key not in waiting]
        room = 0.0 if time_us is None else self._room_ahead(time_us, size)
        n_queued = sum(1 for n in range(1, len(absent) + 1) if n * size <= room)
        self.ahead.extend((key, who) for key in absent[:n_queued])
        self.advance(now)
        return n_queued, absent[n_queued:]

    def _room_ahead(self, time_us: float, size: float) -> float:
        """Return the bytes that are sure to be copied in time, and that the byte budget can spare."""
        ahead, wanted = len(self.ahead) * size, min(len(self.waiting) * size, self.credit)
        in_flight = size if self.in_flight >= 0 else 0.0
        copy_us = self.machine.copy_us(size)
        in_time = time_us * size / copy_us if copy_us else float("inf")
        return min(in_time - in_flight - ahead - wanted, self.credit - wanted - ahead)

    def drop_ahead(self, il: int) -> None:
        """Give up what was expected of a layer that runs now: it comes too late."""
        first = il * self.cache.n_expert
        self.cache.is_expected[first : first + self.cache.n_expert] = False
        for _ in range(len(self.ahead)):
            key, who = self.ahead.popleft()
            if first <= key < first + self.cache.n_expert:
                who.note_dropped()
            else:
                self.ahead.append((key, who))

    def _push(self, key: int, level: int) -> None:
        self._number += 1
        self.waiting[key] = self._number
        self.queued_us += self.machine.copy_us(self.cache.bytes_of[key])
        heapq.heappush(self.queue, (-level, self._number, key))

    def _pop(self) -> tuple[int, int] | None:
        """Return (key, level) of the best waiting copy."""
        while self.queue:
            level, number, key = heapq.heappop(self.queue)
            if self.waiting.get(key) == number:
                self._forget(key)
                return key, -level
        return None

    def _forget(self, key: int) -> None:
        del self.waiting[key]
        self.queued_us -= self.machine.copy_us(self.cache.bytes_of[key])

    def drop(self, key: int) -> None:
        """Take a waiting copy out of the queue."""
        if key in self.waiting:
            self._forget(key)
            self.cache.residency[key] = ABSENT

    def drain(self) -> list[int]:
        """Empty the queue; return its keys in the order in which they would have been copied."""
        keys = []
        while (entry := self._pop()) is not None:
            keys.append(entry[0])
        return keys

    # ---- time

    def advance(self, now: float) -> None:
        """Complete and begin copies up to `now`."""
        while True:
            if self.in_flight >= 0:
                if self.free_at > now:
                    return
                self._complete()
            at = max(self.free_at, self._idle_since, self._held_until)
            if at > now:
                return
            if not self._begin(at):
                self._idle_since = now
                return

    def _begin(self, at: float) -> bool:
        """Begin the next copy that finds a slot; False if none can."""
        return self._begin_ahead(at) or self._begin_queued(at) or self._begin_fill(at)

    def _begin_ahead(self, at: float) -> bool:
        while self.ahead:
            key, who = self.ahead.popleft()
            n_bytes = float(self.cache.bytes_of[key])
            is_there = int(self.cache.residency[key]) in (LOADING, RESIDENT)
            if is_there or self.credit < n_bytes or not self._claim_ahead(key):
                who.note_dropped()
                continue
            self.credit -= n_bytes
            self._start(key, at)
            self._expecting = who
            return True
        return False

    def _claim_ahead(self, key: int) -> bool:
        """Take it out of the other queues, and claim a slot."""
        self.drop(key)
        self.cache.promised.discard(key)
        self.cache.residency[key] = ABSENT
        return self.cache.claim(key, is_ahead=True)

    def _begin_fill(self, at: float) -> bool:
        while self.fills:
            key = heapq.heappop(self.fills)[2]
            if self.cache.claim_promised(key):
                self._start(key, at)
                return True
        return False

    def _start(self, key: int, at: float) -> None:
        self.in_flight, self._expecting = key, None
        self.free_at = at + self.machine.copy_us(float(self.cache.bytes_of[key]))
        self.books.link_us += self.free_at - at

    def _begin_queued(self, at: float) -> bool:
        while (entry := self._pop()) is not None:
            key, level = entry
            n_bytes = float(self.cache.bytes_of[key])
            if self.credit < n_bytes:
                self._push_front(key, level)
                return False
            if not self.cache.claim(key):
                self.cache.residency[key] = ABSENT
                continue
            self.credit -= n_bytes
            self._start(key, at)
            return True
        return False

    def _push_front(self, key: int, level: int) -> None:
        self._push(key, level)
        number = -self._number
        self.waiting[key] = number
        heapq.heappush(self.queue, (-level, number, key))

    def _complete(self) -> None:
        key, self.in_flight = self.in_flight, -1
        self._book(key, float(self.cache.bytes_of[key]))
        self.cache.publish(key)
        if self._expecting is not None:
            self._expecting.note_copied(key)

    def _book(self, key: int, n_bytes: float) -> None:
        self.books.loads += 1
        self.books.bytes_moved += n_bytes
        self.books.loaded_bytes_by_layer[key // self.cache.n_expert] += n_bytes

    def fetch(self, keys: Keys, shares: Floats, now: float) -> float:
        """Copy experts of one layer on demand, one after the other; return when the last one has arrived."""
        start = self.wait_for(self.in_flight, now) if self.in_flight >= 0 else now
        for key in keys:
            self.drop(int(key))
        at = start
        for nth, (key, share) in enumerate(zip(keys, shares, strict=True)):
            n_bytes = float(self.cache.bytes_of[key] * share)
            at += self.machine.copy_us(n_bytes, nth)
            self._book(int(key), n_bytes)
        self.books.link_us += at - start
        self.free_at = self._idle_since = at
        return at

    def wait_for(self, key: int, now: float) -> float:
        """Wait until the copy in flight has arrived; return when."""
        assert self.in_flight == key
        at = max(now, self.free_at)
        self._complete()
        self._idle_since = at
        return at

    def in_flight_us(self, now: float) -> float:
        """Return how long the copy in flight still takes; 0: there is none."""
        return max(self.free_at - now, 0.0) if self.in_flight >= 0 else 0.0

    def busy_us(self, now: float) -> float:
        """Return for how long the link will be at work, as far as it is known."""
        return self.in_flight_us(now) + self.queued_us

    # ---- the engine's byte budget

    def set_budget(self, byte_budget: int) -> None:
        """Take over a budget per forward; NO_BUDGET: no limit."""
        self.byte_budget = byte_budget
        if byte_budget == NO_BUDGET:
            self.credit = float("inf")
        elif self.credit == float("inf"):
            self.credit = float(byte_budget)

    def begin_forward(self) -> None:
        """Renew the budget; what is left over may be saved up to one expert's worth."""
        if self.byte_budget != NO_BUDGET:
            self.credit = min(self.credit + self.byte_budget, self.byte_budget + self._largest)
