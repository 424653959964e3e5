"""Foresight: knows the future and copies, ahead of need, what will be used most before its victim would be.

With `belady` eviction this is the oracle that other policies' speed is compared with. Knobs: `uses`, how
often the newcomer must be used before the victim's next use (a copy costs the host about as much bandwidth
as one use on the host), and `ahead`, copies waiting at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from pyspac.engine.board import Residency
from pyspac.lab.demand import Keys, Times
from pyspac.lab.events import Access, StepBegun
from pyspac.lab.future import NEVER
from pyspac.lab.policy import Copies, Prefetch
from pyspac.lab.registry import register
from pyspac.lab.view import OracleView


@register("foresight")
class Foresight(Prefetch):
    """Looks up next uses for all experts."""

    knobs: ClassVar[dict[str, float]] = {"uses": 1, "ahead": 4}
    limits: ClassVar[dict[str, tuple[float, float]]] = {"uses": (1, 1e4), "ahead": (1, 1e4)}
    expires: ClassVar[bool] = False
    is_clairvoyant: ClassVar[bool] = True
    view: OracleView

    def start(self) -> None:
        """Look up everybody's first uses; kept up to date as uses pass, one layer at a time."""
        cache, ends = self.view.cache, self.view.future.use_end
        self.at = np.concatenate([[0], ends[:-1]])  # [n_cell] index of the next use
        everything = np.arange(self.view.n_cell)
        self.next_use = self._time_of_use(everything, 1)
        # [n_cell] time of the use that pays for a copy
        self.worth_it = self._time_of_use(everything, int(self.knob["uses"]))
        self.members = [np.flatnonzero(cache.group_of == g) for g in range(len(cache.group_slots))]

    def while_drafting(self, event: StepBegun) -> Iterator[Copies]:
        """Use the drafting window too."""
        return self._refill()

    def after_router(self, access: Access) -> Iterator[Copies]:
        """Note that the layer's experts were used, then fill the queue."""
        keys = access.demand.keys
        self.at[keys] += 1
        self.next_use[keys] = self._time_of_use(keys, 1)
        self.worth_it[keys] = self._time_of_use(keys, int(self.knob["uses"]))
        return self._refill()

    def _time_of_use(self, keys: Keys, n: int) -> Times:
        """Return [n] when each expert is used for the n-th time from now, or NEVER."""
        return self.view.future.use_at(keys, self.at[keys] + n - 1)

    def _refill(self) -> Iterator[Copies]:
        """Refill a queue that is half empty: O(n_layer * n_expert)."""
        cache, link = self.view.cache, self.view.link
        n = int(self.knob["ahead"]) - link.n_waiting
        if n < self.knob["ahead"] / 2:
            return
        for group, mine in enumerate(self.members):
            when = np.where(cache.residency[mine] == Residency.ABSENT, self.worth_it[mine], NEVER)
            soonest = np.argpartition(when, min(n, len(when) - 1))[:n]
            soonest = soonest[np.argsort(when[soonest], kind="stable")]
            there = cache.owners(group)
            last = int(self.next_use[there].max()) if len(there) else 0
            n_free = cache.n_free(group) - link.n_waiting
            may_come = (when[soonest] < last) | (np.arange(len(soonest)) < n_free)
            yield Copies(mine[soonest[may_come & (when[soonest] < NEVER)]])
