"""Foresight: knows the future and copies, ahead of need, what will be used most before its victim would be.

With `belady` eviction this is the oracle that other policies' speed is compared with. Knobs: `uses`, how
often the newcomer must be used before the victim's next use (a copy costs the host about as much bandwidth
as one use on the host), and `ahead`, copies waiting at a time.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from pyspac.lab.policy import NEVER, Demand, Keys, Prefetch, register


@register("prefetch", "foresight")
class Foresight(Prefetch):
    """Looks up next uses for all experts."""

    knobs: ClassVar[dict[str, float]] = {"uses": 1, "ahead": 4}
    uses: float
    ahead: float
    expires: ClassVar[bool] = False

    def start(self) -> None:
        """Look up everybody's first uses; kept up to date as uses pass, one layer at a time."""
        ends = self.run.workload.use_end
        self.at = np.concatenate([[0], ends[:-1]])  # [n_cell] index of the next use
        self.times = np.append(self.run.workload.use_times, NEVER)
        everything = np.arange(self.run.n_cell)
        self.next_use = self._time_of_use(everything, 1)
        self.worth_it = self._time_of_use(everything, int(self.uses))  # time of the use that pays for a copy
        self.members = [
            np.flatnonzero(self.run.cache.group_of == g) for g in range(len(self.run.group_slots))
        ]

    def begin_step(self) -> None:
        """Use the drafting window too."""
        self._submit()

    def after_router(self, demand: Demand) -> None:
        """Note that the layer's experts were used, then fill the queue."""
        self.at[demand.keys] += 1
        self.next_use[demand.keys] = self._time_of_use(demand.keys, 1)
        self.worth_it[demand.keys] = self._time_of_use(demand.keys, int(self.uses))
        self._submit()

    def _time_of_use(self, keys: Keys, n: int) -> npt.NDArray[np.int64]:
        """Return when each expert is used for the n-th time from now, or NEVER."""
        at = np.minimum(self.at[keys] + n - 1, self.run.workload.use_end[keys] - 1)
        found = self.times[np.maximum(at, 0)]
        return np.where(self.at[keys] + n - 1 < self.run.workload.use_end[keys], found, NEVER)

    def _submit(self) -> None:
        """Refill a queue that is half empty: O(n_layer * n_expert)."""
        cache, link = self.run.cache, self.run.link
        n = int(self.ahead) - len(link.waiting)
        if n < self.ahead / 2:
            return
        for group, owners in enumerate(cache.owner):
            mine = self.members[group]
            when = np.where(cache.residency[mine] == 0, self.worth_it[mine], NEVER)
            soonest = np.argpartition(when, min(n, len(when) - 1))[:n]
            soonest = soonest[np.argsort(when[soonest], kind="stable")]
            there = owners[owners >= 0]
            last = int(self.next_use[there].max()) if len(there) else 0
            n_free = len(cache.free[group]) - len(link.waiting)
            may_come = (when[soonest] < last) | (np.arange(len(soonest)) < n_free)
            self.run.prefetch(mine[soonest[may_come & (when[soonest] < NEVER)]])
