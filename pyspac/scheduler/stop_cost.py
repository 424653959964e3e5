"""What split layers take beside their experts, and what whole ones save: measured while the model runs.

A layer takes longer by the time of whole ones that follow it, so that

    rest(il) = base(il) + sum over the whole layers w that follow of (base(w) - saved)

where `rest` is what a layer takes beside its experts. Devices differ in what a stop costs (a function of the
host that the device calls, two splits of the graph, a network between them), and so in `base` and `saved`.
Layers of one device follow each other, but where it ends: which whole layers a layer was longer by is known,
whose they are as well, and a step tells of each device apart.
"""

from __future__ import annotations

from collections import deque
from statistics import median  # numpy's own imports numpy.ma when it is first called: 20 ms of a step
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pyspac.scheduler.config import DECAY
from pyspac.scheduler.paired_timing import OUTLIER_RATIO
from pyspac.scheduler.whole_layers import LayerCost

_N_FIRST: Final = 8  # times of a layer before they are believed
_N_KEPT: Final = 64  # samples whose median says what is saved


def n_whole_after(is_whole: NDArray[np.bool_], is_ours: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return [n_layer] how many whole layers follow each split one before the next; 0 for whole ones.

    is_ours: [n_layer] layers that can be split at all.
    """
    is_whole = is_whole & is_ours
    after = np.zeros(len(is_whole), np.int64)
    splits = np.flatnonzero(is_ours & ~is_whole)
    n_before = np.cumsum(is_whole)
    ends = np.append(splits[1:], len(is_whole) - 1)
    after[splits] = n_before[ends] - n_before[splits]
    return after


class StopCost:
    """Measures it for some layers, a device's.

    Layers differ, and machines have accidents: a layer is compared with itself, and medians decide.
    """

    def __init__(self, is_ours: NDArray[np.bool_]) -> None:
        """Nothing is known. is_ours: [n_layer] those layers."""
        self._is_ours = is_ours
        self._base = np.zeros(len(is_ours))  # microseconds of each layer, of times when none was whole
        self._pace = 1.0  # how much longer the split ones take now
        self._n_base = np.zeros(len(is_ours), np.int64)
        self._saved: deque[float] = deque(maxlen=_N_KEPT)  # of the last samples with whole layers
        self.n_samples = 0  # such ones

    @property
    def base_us(self) -> float:
        """Return it per layer; 0 before the first sample."""
        return self._pace * median(self._base[self._n_base > 0].tolist()) if self._n_base.any() else 0.0

    @property
    def saved_us(self) -> float | None:
        """Return it per whole layer; None before there was one. Never more than `base_us`."""
        return min(self._pace * median(self._saved), self.base_us) if self._saved else None

    def observe(
        self,
        stats: NDArray[Any],
        after: NDArray[np.int64],
        busy_us: NDArray[np.float64],
        is_whole: NDArray[np.bool_],
    ) -> None:
        """Take in a sample of some steps: spac_layer_stats, `n_whole_after`, what the experts took.

        All are [n_layer]. The last layer of a forward has no time.
        """
        us, n_calls = stats["layer_us"].astype(np.float64), stats["n_calls"].astype(np.float64)
        is_timed = self._is_ours & (us > 0) & (n_calls > 0)
        rest = np.maximum(us - busy_us, 0.0) / np.maximum(n_calls, 1.0)
        plain = is_timed & (after == 0)
        if not (is_whole & self._is_ours).any():
            self._pace = 1.0
            self._learn_base(rest, plain)
            return
        known = plain & (self._n_base >= _N_FIRST)
        first, end = self._followed(is_timed & (after > 0), after, is_whole)
        if len(first) == 0 or not known.any():
            return
        pace = median((rest[known] / np.maximum(self._base[known], 1e-9)).tolist())  # of this sample
        self._pace += (1.0 - DECAY) * (min(pace, OUTLIER_RATIO) - self._pace)
        # what the whole layers would take if they were split, less what they take
        base = np.where(self._n_base > 0, self._base, self.base_us / self._pace)
        total = np.cumsum(np.where(is_whole, base, 0.0))
        expected = base[first] + total[end] - total[first]
        self._saved.append(float((expected - rest[first] / max(pace, 1e-9)).sum() / after[first].sum()))
        self.n_samples += 1

    def _followed(
        self, is_followed: NDArray[np.bool_], after: NDArray[np.int64], is_whole: NDArray[np.bool_]
    ) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return which of those layers are followed only by our whole ones, and the last one behind each."""
        first = np.flatnonzero(is_followed)
        end = np.flatnonzero(is_whole)[np.cumsum(is_whole)[first] + after[first] - 1]
        n_ours = np.cumsum(is_whole & self._is_ours)
        is_alone: NDArray[np.bool_] = n_ours[end] - n_ours[first] == after[first]
        return first[is_alone], end[is_alone]

    def _learn_base(self, rest: NDArray[np.float64], plain: NDArray[np.bool_]) -> None:
        is_believed = np.where(self._n_base >= _N_FIRST, np.minimum(rest, OUTLIER_RATIO * self._base), rest)
        weight = np.maximum(1.0 / (1.0 + self._n_base), 1.0 - DECAY)[plain]
        self._base[plain] += weight * (is_believed - self._base)[plain]
        self._n_base[plain] += 1


class StopCosts:
    """`StopCost` of each device; of all together, where a single one has not shown it."""

    def __init__(self, device_of_layer: NDArray[np.intp], n_device: int) -> None:
        """Nothing is known. device_of_layer: [n_layer]."""
        self.together = StopCost(np.ones(len(device_of_layer), bool))
        self._alone = [StopCost(device_of_layer == i) for i in range(n_device)] if n_device > 1 else []

    def observe(
        self,
        stats: NDArray[Any],
        after: NDArray[np.int64],
        busy_us: NDArray[np.float64],
        is_whole: NDArray[np.bool_],
    ) -> None:
        """Take in a sample, as `StopCost.observe`."""
        for cost in (self.together, *self._alone):
            cost.observe(stats, after, busy_us, is_whole)

    def of(self, device: int) -> StopCost:
        """Return what was seen of that device."""
        return self._alone[device] if self._alone else self.together

    def saved_us(self, device: int) -> float | None:
        """Return microseconds per whole layer; None before there was one, of any device."""
        own = self.of(device).saved_us
        return self.together.saved_us if own is None else own

    def layer_cost(self, device: int, *, is_concurrent: bool) -> LayerCost:
        """Return what a layer of that device takes beside its experts; saved is 0 until it was seen."""
        base_us = self.of(device).base_us or self.together.base_us
        return LayerCost(base_us, min(self.saved_us(device) or 0.0, base_us), is_concurrent)
