"""When experts will be asked for: what only bounds may know, never a policy that could run in an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from pyspac.lab.demand import Demand, Keys, Times

NEVER: Final = 2**62  # the time of a use that does not come


class Future:
    """The times (step * n_layer + il) of all uses in a workload. O(uses) to make."""

    def __init__(self, steps: Sequence[Sequence[Demand]], n_layer: int, n_cell: int) -> None:
        """Look through the demands of all steps once forwards, once backwards."""
        self.n_layer = n_layer
        self.use_times, self.use_end = _use_times(steps, n_layer, n_cell)
        self._next_use: dict[int, Times] = {}  # by the time of the access
        self.first_use = np.full(n_cell, NEVER, np.int64)  # [n_cell]
        for step in range(len(steps) - 1, -1, -1):
            for demand in steps[step]:  # keys of different layers never meet
                time = step * n_layer + demand.il
                self._next_use[time] = self.first_use[demand.keys]
                self.first_use[demand.keys] = time

    def next_use(self, step: int, il: int) -> Times:
        """Return [n] when the experts that this layer asks for in this step are asked for again, or NEVER."""
        return self._next_use[step * self.n_layer + il]

    def use_at(self, keys: Keys, index: npt.NDArray[np.intp]) -> Times:
        """Return [n] the time of a use by its index in `use_times`, or NEVER beyond an expert's last one."""
        end = self.use_end[keys]
        found = self.use_times[np.maximum(np.minimum(index, end - 1), 0)]
        return np.where(index < end, found, NEVER)


def _use_times(
    steps: Sequence[Sequence[Demand]], n_layer: int, n_cell: int
) -> tuple[Times, npt.NDArray[np.intp]]:
    """Return the times of all uses, expert by expert, and [n_cell] where each expert's times end."""
    demands = [(step * n_layer + d.il, d.keys) for step, layers in enumerate(steps) for d in layers]
    keys = np.concatenate([k for _, k in demands])
    times = np.repeat([t for t, _ in demands], [len(k) for _, k in demands])
    order = np.argsort(keys, kind="stable")
    return times[order], np.cumsum(np.bincount(keys, minlength=n_cell))
