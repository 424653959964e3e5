"""The one table of costs: how long a step takes that drafts so many tokens, learned while the model runs.

In: step records. Out: microseconds of a step, and how sure they are. A step is a pass, whose time depends on
the tokens in the batch (its width), and drafting, so much per token. The balancer has costs of its own, per
expert (pyspac/scheduler/cost_model.py).

T(n) = level * shape(n). The level is that of the moment: it moves with whatever makes all passes longer or
shorter (another program on the same core, a longer context, more experts resident), and is learned from
every sample. The shape of a width is its own, and settles. A sample that is not what was expected is divided
between both in proportion to what is uncertain about each (a Kalman filter of two logarithms), so widths that
were not seen lately are right in the mean when they are used again. One that is far off moves the level at
first, and the shape when it repeats while others are as expected. What plain passes take is the level, once
their shape is settled (some ten samples): a rise moves only the level, so if their shape took its part of
each fall, it would sink with every program that comes and goes, and other widths be thought dearer without
end. A width that was never seen takes as long as the next narrower one, or up to n / n' times as long: no
pass is shorter than a narrower one, and n tokens at once cost no more than one by one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from pyspac.engine.step import StepRecord

# Variances of log T. Of one sample: 17 %, by which passes scatter on a machine that others use too.
NOISE: Final = 0.03
# Of the level, per pass: another program comes or goes within seconds, and ten passes should follow it.
LEVEL_DRIFT: Final = 0.004
# Of a shape, per pass since it was seen: a context grows, a cache warms up. After 150 passes without a look a
# time is in doubt by as much as after its first sample.
SHAPE_DRIFT: Final = 0.0002
# Standard deviations that are believed of a sample: what lies beyond is an accident (a page fault, a lost
# time slice) until it repeats.
SURPRISE: Final = 2.0
_BEGUN: Final = (
    SURPRISE * SURPRISE * NOISE
)  # of a sample that has more in it than the step, and how much is unknown


class Estimate(NamedTuple):
    """A time whose logarithm is normally distributed."""

    us: float
    variance: float  # of log(us), the level's not counted: it is the same for all widths


@dataclass(slots=True)
class _Shape:
    mean: float  # of log T, less the level
    variance: float
    seen: int = 0  # value of n_observed
    level: float = 0.0  # when it was seen
    surprised: int = 0  # value of n_observed, when it was not as expected; 0: its last sample was


class TimeCurve:
    """T(n) of one kind of work."""

    def __init__(self) -> None:
        """Nothing measured."""
        self.n_observed = 0
        self._shapes: dict[int, _Shape] = {}  # ascending
        self._level = 0.0
        self._level_variance = 0.0
        self._n_expected = 0  # value of n_observed, when a sample was last as expected

    def observe(self, n: int, us: float, noise: float = NOISE, is_plain: bool = False) -> None:
        """Take in one measured time of width `n`, and the variance of its logarithm; 0 us: none was taken.

        `is_plain`: whether it is what others are compared with.
        """
        if us <= 0.0:
            return
        self.n_observed += 1
        x = math.log(max(us, 1.0))  # no clock tells less
        if n in self._shapes:
            self._learn(self._shapes[n], x, noise, is_plain)
        else:
            self._add(n, x, noise)
        self._shapes[n].seen, self._shapes[n].level = self.n_observed, self._level

    def _learn(self, shape: _Shape, x: float, noise: float, is_plain: bool) -> None:
        """Divide what was not expected between the level and the shape."""
        if not is_plain:
            shape.variance = self._variance(shape)
        self._level_variance += LEVEL_DRIFT
        error = x - self._level - shape.mean
        if (surprise := error * error / (SURPRISE * SURPRISE * self._sample_variance(shape, noise))) > 1.0:
            self._level_variance *= surprise  # all passes became longer or shorter, rather than this width's
            if 0 < shape.surprised < self._n_expected:
                shape.variance *= surprise  # others were as expected meanwhile
            shape.surprised = self.n_observed
            if error > 0.0:
                return  # an accident, until it repeats; nothing makes a pass too short
        else:
            shape.surprised, self._n_expected = 0, self.n_observed
        total = self._sample_variance(shape, noise)
        to_level, to_shape = self._level_variance / total, shape.variance / total
        if is_plain and shape.variance <= LEVEL_DRIFT:
            to_shape = 0.0  # see the top
        self._level += to_level * error
        shape.mean += to_shape * error
        self._level_variance *= 1.0 - to_level
        shape.variance *= 1.0 - to_shape

    def _sample_variance(self, shape: _Shape, noise: float) -> float:
        """Of the logarithm of a measured time."""
        return self._level_variance + shape.variance + noise

    def _add(self, n: int, x: float, noise: float) -> None:
        """The first sample of a width, weighed against what is possible: what lies beyond is an accident."""
        least, most = self._bounds(n) or (x, x)
        mean, variance = max(least, min(x, most)), (most - least) ** 2 / 12.0
        if least == most:
            variance = _BEGUN
        elif mean == x:
            weight = variance / (variance + noise)
            mean = (1.0 - weight) * 0.5 * (least + most) + weight * x
            variance *= 1.0 - weight
        self._shapes[n] = _Shape(mean - self._level, variance)
        self._shapes = dict(sorted(self._shapes.items()))

    def _bounds(self, n: int) -> tuple[float, float] | None:
        """log T(n) of a width that was not measured, at least and at most; None: nothing was measured."""
        narrower = max((m for m in self._shapes if m < n), default=None)
        wider = min((m for m in self._shapes if m > n), default=None)
        if narrower is None:
            if wider is None:
                return None
            most = self._level + self._shapes[wider].mean
            return most - math.log(wider / n), most
        least = self._level + self._shapes[narrower].mean
        most = least + math.log(n / narrower)
        if wider is not None:
            most = max(least, min(most, self._level + self._shapes[wider].mean))
        return least, most

    def _variance(self, shape: _Shape) -> float:
        """The shape's, by now."""
        drift = min(SHAPE_DRIFT * (self.n_observed - shape.seen), 100.0)  # a server runs for years
        return shape.variance + drift

    def _choice_variance(self, shape: _Shape) -> float:
        """The same for a choice: what the level has moved by since may have been only other widths'."""
        moved = self._level - shape.level
        return self._variance(shape) + moved * moved

    def estimate(self, n: int) -> Estimate | None:
        """T(n): measured, or between what it is at least and at most; None: nothing was measured."""
        shape = self._shapes.get(n)
        if shape is not None:
            return Estimate(math.exp(self._level + shape.mean), self._choice_variance(shape))
        bounds = self._bounds(n)
        if bounds is None:
            return None
        least, most = bounds
        return Estimate(math.exp(0.5 * (least + most)), NOISE + (most - least) ** 2 / 12.0)

    def us(self, n: int) -> float | None:
        """Only T(n)."""
        estimate = self.estimate(n)
        return None if estimate is None else estimate.us

    def widths(self) -> list[int]:
        """Widths that were measured, ascending."""
        return list(self._shapes)


class CostTable:
    """What steps cost; kept across requests."""

    def __init__(self) -> None:
        """Nothing measured."""
        self.passes = TimeCurve()  # by tokens in the batch; verification, sampling, and the loop around them
        self.returns = TimeCurve()  # plain passes after one of another width
        self.drafts = TimeCurve()  # of one token
        self._draft_us = 0.0  # what it says
        self.backlogs = TimeCurve()  # by tokens that the drafter has missed, a power of two

    def observe(self, record: StepRecord, before: StepRecord | None, n_missed: int = 0) -> None:
        """Take in one step; `before`: the same sequence's last one, if there was one.

        `n_missed`: tokens since the last draft, which the drafter has to read before the next.

        A pass of another width than the one before sets up its graph anew, which is no part of T(n). What
        that takes is seen where plain steps follow drafts: the plain step's own time is known best. With
        others in the batch widths change whatever is drafted, and it is a part of T(n). A plain step after a
        prompt says nothing: caches are cold.
        """
        width, n_draft, is_plain = record.width, record.n_draft, record.is_plain
        us = record.total_us - record.draft_us
        if record.n_others or (before is not None and width == before.width):
            self.passes.observe(width, us, is_plain=is_plain)
        elif not is_plain and us > 0.0:
            change_us = min(self.change_us(), 0.5 * us)
            variance = math.log(us / (us - change_us)) ** 2 if self.returns.n_observed else _BEGUN
            self.passes.observe(width, us - change_us, NOISE + variance)
        elif before is not None and is_plain:
            self.returns.observe(1, us)
        if n_draft:
            self._observe_draft(record.draft_us, n_draft, n_missed)

    def _observe_draft(self, us: float, n_draft: int, n_missed: int) -> None:
        """What a draft takes more after a pause is the backlog's: as much as a token, at first."""
        if not n_missed:
            self.drafts.observe(1, us / n_draft)
        elif not self.drafts.n_observed:
            self.drafts.observe(1, us / (1 + n_draft), _BEGUN)
        self._draft_us = self.drafts.us(1) or 0.0
        if n_missed:
            self.backlogs.observe(_bucket(n_missed), max(1.0, us - n_draft * self._draft_us))

    def backlog_us(self, n_missed: int, n_draft: int) -> float:
        """What the next draft, of `n_draft` tokens, takes more, if the drafter has missed so many tokens."""
        return self.backlogs.us(_bucket(n_missed)) or 0.0 if n_missed else 0.0

    def step(self, n_draft: int, n_others: int = 0) -> Estimate | None:
        """A whole step that drafts `n_draft` tokens, beside `n_others` of other sequences."""
        return self._estimate(self.width(n_draft) + n_others, n_draft)

    def one_by_one_us(self, n_draft: int, plain: Estimate, n_others: int = 0) -> float:
        """What the same step would take if its tokens went one by one: no step is longer, but by accident.

        A time that was not seen for long is in doubt without end; this bounds what trying it again may cost.
        """
        return plain.us * (self.width(n_draft) + n_others) / (1 + n_others) + n_draft * self._draft_us

    def width(self, n_draft: int) -> int:
        """Tokens of a pass that verifies so many drafts."""
        return 1 + n_draft

    def usual(self, record: StepRecord) -> Estimate | None:
        """What a step like this one takes."""
        return self._estimate(record.width, record.n_draft)

    def _estimate(self, width: int, n_draft: int) -> Estimate | None:
        """Of a pass of this width, and `n_draft` drafted tokens."""
        a_pass = self.passes.estimate(width)
        if a_pass is None:
            return None
        return Estimate(a_pass.us + n_draft * self._draft_us, a_pass.variance)

    def change_us(self) -> float:
        """What a pass takes more if the one before had another width, with one sequence."""
        after, settled = self.returns.us(1), self.passes.us(1)
        return 0.0 if after is None or settled is None else max(0.0, after - settled)

    def to_dict(self) -> dict[str, Any]:
        """Microseconds by measured width."""
        return {
            "draft_us": {n: round(self.drafts.us(n) or 0.0, 1) for n in self.drafts.widths()},
            "pass_us": {n: round(self.passes.us(n) or 0.0, 1) for n in self.passes.widths()},
        }


class MaskCosts(CostTable):
    """Of a drafter that drafts in the pass which verifies the last drafts."""

    def width(self, n_draft: int) -> int:
        """See CostTable: as many drafts again are made behind each token."""
        return masked_width(n_draft, n_draft)

    def backlog_us(self, n_missed: int, n_draft: int) -> float:
        """See CostTable: a step has to draft before one can verify."""
        begins, plain = self.passes.us(masked_width(0, n_draft)), self.passes.us(1)
        return 0.0 if not n_missed or begins is None or plain is None else max(0.0, begins - plain)


def masked_width(n_draft: int, n_masks: int) -> int:
    """Tokens of a pass that verifies `n_draft` drafts, with `n_masks` masks behind each token."""
    return (1 + n_draft) * (1 + n_masks)


def _bucket(n: int) -> int:
    """The greatest power of two that is not above n."""
    return 1 << (n.bit_length() - 1)
