"""ARC: recency and frequency, balanced by two ghost lists (Megiddo and Modha 2003). An outside reference.
No knob.

T1 holds experts seen once of late, T2 those seen again; B1 and B2 remember whom they lost. A miss that is
found in B1 raises the target size of T1, one in B2 lowers it. One ARC per layout group.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from pyspac.lab.demand import Indices, Keys
from pyspac.lab.events import Access, Evicted, Loaded
from pyspac.lab.policy import Eviction
from pyspac.lab.registry import register


class _Lists:
    """The four lists of one layout group."""

    def __init__(self, n_slots: int) -> None:
        self.n_slots = n_slots
        self.target = 0.0  # of T1
        self.t1: OrderedDict[int, None] = OrderedDict()  # oldest first
        self.t2: OrderedDict[int, None] = OrderedDict()
        self.b1: OrderedDict[int, None] = OrderedDict()
        self.b2: OrderedDict[int, None] = OrderedDict()

    def touch(self, key: int) -> None:
        """A resident was used."""
        if key in self.t1:
            del self.t1[key]
            self.t2[key] = None
        elif key in self.t2:
            self.t2.move_to_end(key)

    def come(self, key: int) -> None:
        """An expert has taken a slot."""
        is_known = key in self.b1 or key in self.b2
        if key in self.b1:
            self.target = min(self.target + max(len(self.b2) / len(self.b1), 1.0), self.n_slots)
        elif key in self.b2:
            self.target = max(self.target - max(len(self.b1) / len(self.b2), 1.0), 0.0)
        self.b1.pop(key, None)
        self.b2.pop(key, None)
        (self.t2 if is_known else self.t1)[key] = None

    def go(self, key: int) -> None:
        """An expert has left its slot."""
        for alive, ghost in ((self.t1, self.b1), (self.t2, self.b2)):
            if key in alive:
                del alive[key]
                ghost[key] = None
                if len(ghost) > self.n_slots:
                    ghost.popitem(last=False)


@register("arc")
class Arc(Eviction):
    """Victims are the oldest of T1 while it is above its target, else of T2."""

    def start(self) -> None:
        """Make the lists of each group."""
        super().start()
        self.lists = [_Lists(n) for n in self.view.cache.group_slots]

    def _of(self, key: int) -> _Lists:
        return self.lists[int(self.view.cache.group_of[key])]

    def on_access(self, access: Access) -> None:
        """Move hits to the young end of T2."""
        for key in access.demand.keys[access.is_hit].tolist():
            self._of(key).touch(key)

    def on_loaded(self, event: Loaded) -> None:
        """Enter T1, or T2 if a ghost list remembers it."""
        self._of(event.key).come(event.key)

    def on_evicted(self, event: Evicted) -> None:
        """Enter the ghost list."""
        self._of(event.key).go(event.key)

    def victims(self, candidates: Keys, n: int) -> Indices:
        """Take from T1 while it is too large, else from T2."""
        lists = self._of(int(candidates[0]))
        where = {key: i for i, key in enumerate(candidates.tolist())}
        t1 = [key for key in lists.t1 if key in where]
        t2 = [key for key in lists.t2 if key in where]
        n_from_t1 = min(max(int(len(lists.t1) - lists.target + 0.5), n - len(t2), 0), n, len(t1))
        chosen = t1[:n_from_t1] + t2[: n - n_from_t1]
        return np.array([where[key] for key in chosen], np.intp)
