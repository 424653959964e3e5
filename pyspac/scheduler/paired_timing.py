"""Two ways to run, timed in turns: samples of step times in, how much slower the second is, and how sure.

Steps are compared only with steps of the same kind (tokens in the batch, tokens drafted), so that drafts
which hold or fail, and decisions on their length, are no difference between the two ways.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from statistics import median  # numpy's own imports numpy.ma when it is first called: 20 ms of a step
from typing import Final, NamedTuple

import numpy as np

Kind = tuple[int, int]  # width of the batch, tokens drafted
# a sample beyond so many medians is an accident (a page fault, a lost time slice), not what a way costs: a
# copy that holds up a step makes it half as long again, or twice as long
OUTLIER_RATIO: Final = 3.0
N_LEAST: Final = 3  # samples of a kind whose scatter says anything
_LEAST_VARIANCE: Final = 1e-6  # of log T: clocks are not better


class Sample(NamedTuple):
    """One step."""

    kind: Kind
    us: float


class Ratio(NamedTuple):
    """log(T of the one / T of the other), and its variance."""

    log: float
    variance: float

    def is_above(self, least: float, n_sigma: float) -> bool:
        """Whether the ratio's logarithm is sure to be above 0, and is above `least`."""
        return self.log > max(least, n_sigma * math.sqrt(self.variance))

    def reversed(self) -> Ratio:
        """The other against the one."""
        return Ratio(-self.log, self.variance)


def mean_times(samples: Iterable[Sample]) -> dict[Kind, tuple[float, float, int]]:
    """By kind: mean microseconds, their relative variance of one sample, and how many there are."""
    by_kind: defaultdict[Kind, list[float]] = defaultdict(list)
    for kind, us in samples:
        by_kind[kind].append(us)
    means = {}
    for kind, times in by_kind.items():
        believed = np.minimum(times, OUTLIER_RATIO * median(times))
        mean = float(believed.mean())
        means[kind] = (mean, float(believed.var()) / mean**2, len(times))
    return means


def compare(one: Iterable[Sample], other: Iterable[Sample]) -> Ratio | None:
    """How much longer steps of `one` take than those of `other`; None: they have no kind in common."""
    times, against = mean_times(one), mean_times(other)
    ratios = []
    for kind in times.keys() & against.keys():
        (us, scatter, n), (us_against, scatter_against, n_against) = times[kind], against[kind]
        if min(n, n_against) >= N_LEAST:
            variance = max(scatter / n + scatter_against / n_against, _LEAST_VARIANCE)
            ratios.append(Ratio(math.log(us / us_against), variance))
    return pooled(ratios)


def pooled(ratios: list[Ratio]) -> Ratio | None:
    """Their mean, the surest ones first; what they differ by among themselves counts as doubt. None: none."""
    if not ratios:
        return None
    weights = [1.0 / ratio.variance for ratio in ratios]
    total = sum(weights)
    mean = sum(w * ratio.log for w, ratio in zip(weights, ratios, strict=True)) / total
    spread = sum(w * (ratio.log - mean) ** 2 for w, ratio in zip(weights, ratios, strict=True)) / total
    return Ratio(mean, max(1.0 / total, spread / max(1, len(ratios) - 1)))
