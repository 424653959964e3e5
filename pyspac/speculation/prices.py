"""What each draft length costs, in plain steps, read off the cost table, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

from pyspac.speculation.cost_table import CostTable

N_COST_SAMPLES: Final = 2  # of a width before its time is believed
UNSURE: Final = 0.3  # a time that is not sure may be less by this share / sqrt(samples)


class Prices:
    """cost(K) of cascade.txt, equation 2, for some draft lengths; renewed every few steps."""

    def __init__(self, table: CostTable, lengths: Sequence[int]) -> None:
        """Ascending `lengths`, from 1."""
        self.table = table
        self.lengths = lengths
        self.cost: dict[int, float] = dict.fromkeys(lengths, math.inf)
        self.least: dict[int, float] = dict.fromkeys(lengths, 1.0)  # what it may cost, as far as one knows
        self.by_length: list[float] = [math.inf] * (1 + max(lengths, default=0))  # cost(0), cost(1), ...
        self.unsure: list[int] = list(lengths)  # those with few samples
        self.switch = 0.0  # what a step of another width than the last one costs besides, in plain steps

    def renew(self, n_others: int) -> None:
        """Read the table; `n_others`: tokens of other sequences in the batch."""
        base = self.table.step_us(0, n_others)
        self.switch = self.table.switch_us / base if base else 0.0
        floor = 1.0  # no pass is shorter than a narrower one
        self.unsure = []
        for k in self.lengths:
            width = 1 + k + n_others
            n_samples, is_sure = self.table.verify.n_samples(width), self.table.verify.is_sure(width)
            self.cost[k] = self._cost(k, n_others, base, is_sure=is_sure)
            if n_samples < N_COST_SAMPLES:
                self.least[k] = floor
            else:
                share = 1.0 if is_sure else 1.0 - UNSURE / math.sqrt(n_samples)
                self.least[k] = share * self.cost[k]
                floor = max(floor, self.least[k])
            if not is_sure:
                self.unsure.append(k)
        self.by_length = list(self._interpolated()) if base else [math.inf] * len(self.by_length)

    def _interpolated(self) -> Iterator[float]:
        """cost(0), cost(1), ...: drafts may end at lengths that are not among those to choose from."""
        points = [(0, 1.0), *self.cost.items()]
        for (k0, c0), (k1, c1) in pairwise(points):
            yield from (c0 + (c1 - c0) * (k - k0) / (k1 - k0) for k in range(k0, k1))
        yield points[-1][1]

    def _cost(self, k: int, n_others: int, base: float | None, *, is_sure: bool) -> float:
        step = self.table.step_us(k, n_others, is_optimistic=True)
        if step is None or not base:
            return math.inf
        cost = max(step / base, 1e-3)
        return (
            cost if is_sure else min(cost, 1.0 + k)
        )  # more than one by one is an accident, until it repeats
