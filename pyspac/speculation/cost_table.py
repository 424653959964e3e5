"""The one table of costs: how long a step of each class takes at each width, learned while the model runs.

In: step records. Out: T(n) in microseconds for the classes draft (by tokens drafted), verify (by tokens in
the batch; the experts' part apart where it is known) and process. Speculation control decides by it, `pyspac
profile` shows it. The balancer has costs of its own, per expert (pyspac/scheduler/cost_model.py).

T(n) = level * shape(n). The level is that of the moment: it moves with whatever makes all passes longer or
shorter (another program on the same core, a longer context, more experts resident), and is learned from
every sample. The shape of a width is its own, and settles. A sample that is not what was expected is divided
between both in proportion to what is uncertain about each (a Kalman filter of two logarithms), so widths that
were not seen lately are right in the mean when they are used again. One sample far off is taken for an
accident (a page fault, a core lost to another program), the second for a change.

A pass of another width than the one before sets up its graph anew, which on small models takes half as long
as a plain pass. T(n) is that of a settled pass; what a switch adds is a figure of its own.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

from pyspac.engine.step import StepRecord

NOISE: Final = 0.03  # variances of log T: of a sample
LEVEL_DRIFT: Final = 0.004  # of the level, per observation
SHAPE_DRIFT: Final = 0.0003  # of a shape, per observation of its width
CHANGE: Final = 0.2  # of the level, or of a shape, when it has changed at once
FAR: Final = 0.35  # |log| between a sample and what was expected: an accident, until it repeats
HUGE: Final = 1.0  # from here on it is the width that changed: no machine becomes so slow at once
N_SURE_MIN: Final = 3  # samples of a width before its time is sure, if they agree
N_SURE_MAX: Final = 8  # or if they do not
ALIKE: Final = 0.25  # |log| between samples that agree
ANY_WIDTH: Final = 1  # of what is much the same at all widths, and scatters more than it differs
N_SMALL: Final = 4  # steps between samples of what is small, or the same at every width
SLOPE_PRIOR: Final = 0.6  # of one more token, in T(1): the union of experts at width 2 (1.6 .. 1.8 times)
SWITCH_GAIN: Final = 0.15  # of what a switch takes
SMALL: Final = 0.1  # share of a pass; where a switch takes less, a switched pass is as good as a settled one
OLD: Final = 16  # observations after which it is better than nothing elsewhere
OPTIMISM: Final = 0.5  # share of the expected slope that an optimist assumes beyond what was measured


@dataclass(slots=True)
class _Width:
    """What is known of one width; logs of microseconds."""

    shape: float = 0.0  # less the level
    variance: float = NOISE  # of the shape
    last: deque[float] = field(default_factory=lambda: deque(maxlen=3))  # samples, less the level of then
    n_samples: int = 0
    seen: int = 0  # value of n_observed
    level: float = 0.0  # when it was seen
    far: int = 0  # sign of its last sample's error, if that was far off


class WidthCurve:
    """T(n) of one class of work."""

    def __init__(self, *, is_zero_at_zero: bool = False) -> None:
        """`is_zero_at_zero`: no tokens cost nothing (drafting)."""
        self.is_zero_at_zero = is_zero_at_zero
        self._of: dict[int, _Width] = {}
        self._widths: list[int] = []  # sorted keys
        self._cached: list[tuple[int, float]] | None = None  # _points()
        self._level = 0.0  # log
        self._variance = 0.0  # of the level
        self._far = 0  # sign of the last sample's error, if that was far off
        self.n_observed = 0

    def observe(self, n: int, us: float) -> None:
        """Take in one measured time of width `n`. O(1)."""
        if us <= 0.0 or n < 0:
            return
        self.n_observed += 1
        self._cached = None
        if n not in self._of:
            self._of[n] = _Width()
            self._widths = sorted(self._of)
        width, x = self._of[n], math.log(us)
        if width.n_samples >= N_SURE_MIN:
            self._learn(width, x - self._level - width.shape)
        width.last.append(x - self._level)
        width.n_samples += 1
        if width.n_samples <= N_SURE_MIN:
            width.shape = min(width.last)  # any of the first ones may be an accident
        width.seen, width.level = self.n_observed, self._level

    def _learn(self, width: _Width, error: float) -> None:
        """Divide an error between the level and the width's shape."""
        self._variance += LEVEL_DRIFT
        width.variance += SHAPE_DRIFT
        error = self._believed(width, error)
        total = self._variance + width.variance + NOISE
        to_level, to_shape = self._variance / total, width.variance / total
        self._level += to_level * error
        width.shape += to_shape * error
        self._variance *= 1.0 - to_level
        width.variance *= 1.0 - to_shape

    def _believed(self, width: _Width, error: float) -> float:
        """How much of an error is believed: little of one that is far off and alone, else all.

        Two such samples in a row are a change of the level, two of one width between others one of its shape.
        """
        far = 0 if abs(error) <= FAR else 1 if error > 0.0 else -1
        before, self._far = self._far, far
        own, width.far = width.far, far
        if far == 0:
            return error
        if far not in (before, own):
            return far * 0.5 * FAR
        if far == before and abs(error) < HUGE:
            self._variance = max(self._variance, CHANGE)
        else:
            width.variance = max(width.variance, CHANGE)
        return error

    def n_samples(self, n: int) -> int:
        """How often width `n` was seen."""
        return self._of[n].n_samples if n in self._of else 0

    def is_sure(self, n: int) -> bool:
        """Whether width `n` was seen three times with about the same result, or often."""
        width = self._of.get(n)
        if width is None or width.n_samples < N_SURE_MIN:
            return False
        return width.n_samples >= N_SURE_MAX or max(width.last) - min(width.last) < ALIKE

    def age(self, n: int) -> int | None:
        """Observations since width `n` was seen; None: never."""
        return self.n_observed - self._of[n].seen if n in self._of else None

    def drift(self, n: int) -> float:
        """How far the level moved since width `n` was seen, |log|: it is that much in doubt."""
        return abs(self._level - self._of[n].level) if n in self._of else 0.0

    def widths(self) -> list[int]:
        """Widths that were measured, ascending."""
        return self._widths

    def us(self, n: int, *, is_optimistic: bool = False) -> float | None:
        """T(n): measured, or between or beyond measured widths; None: nothing was measured.

        Beyond the widest, the mean slope goes on; for an optimist a part of it, or of the last slope if that
        is smaller (after a switch of kernels it often is).
        """
        if n in self._of:
            return self._at(n)
        points = self._points()
        if not points:
            return None
        i = bisect_left(points, (n, 0.0))
        if i == len(points):
            return self._beyond(points, n, is_optimistic)
        if i == 0:
            return points[0][1]  # narrower than all: at most as long
        (n0, us0), (n1, us1) = points[i - 1], points[i]
        return us0 + (us1 - us0) * (n - n0) / (n1 - n0)

    def _at(self, n: int) -> float:
        return math.exp(self._level + self._of[n].shape)

    def _points(self) -> list[tuple[int, float]]:
        if self._cached is None:
            origin = [(0, 0.0)] if self.is_zero_at_zero and self._widths else []
            self._cached = origin + [(n, self._at(n)) for n in self._widths]
        return self._cached

    def _beyond(self, points: list[tuple[int, float]], n: int, is_optimistic: bool) -> float:
        n_last, us_last = points[-1]
        slope = SLOPE_PRIOR * us_last / max(1, n_last)
        if len(points) > 1:
            slope = _slope(points[0], points[-1])
        if is_optimistic:
            slope = OPTIMISM * min(slope, _slope(*points[-2:]) if len(points) > 1 else slope)
        slope = min(slope, us_last / max(1, n_last))  # n tokens at once cost no more than one by one
        return us_last + slope * (n - n_last)


def _slope(a: tuple[int, float], b: tuple[int, float]) -> float:
    return max(0.0, (b[1] - a[1]) / (b[0] - a[0]))


class CostTable:
    """T(n) of draft, verify and process; kept across requests."""

    def __init__(self) -> None:
        """Nothing measured."""
        self.draft = WidthCurve(is_zero_at_zero=True)
        self.verify = WidthCurve()  # without the experts, where their part is known
        self.experts = WidthCurve()
        self.process = WidthCurve()
        self.overhead = WidthCurve()
        self.switch_us = 0.0  # what a pass of another width than the last one takes besides
        self.n_observed = 0
        self._last_width = 0  # 0: some other work came between
        self._switched_us: float | None = None  # of the last pass, if it was a switch

    def observe(self, record: StepRecord, *, is_draft_typical: bool = True) -> None:
        """Take in one step's times; drafting counts if it is typical (there was nothing to catch up)."""
        self.n_observed += 1
        self.observe_verify(record.width, record.verify_us, record.experts_us)
        if self.n_observed % N_SMALL == 1 or not self.process.n_samples(record.width):
            self.process.observe(record.width, record.process_us + record.sample_us)
            self.overhead.observe(ANY_WIDTH, record.overhead_us)
        if record.n_draft and is_draft_typical:
            self.draft.observe(record.n_draft, record.draft_us)

    def pass_by(self, n_tokens: int) -> None:
        """A forward pass that is not looked at; 0: anything else that sets up a graph, such as a prompt."""
        self._last_width, self._switched_us = n_tokens, None

    def observe_verify(self, n_tokens: int, verify_us: float, experts_us: float = 0.0) -> None:
        """Take in one forward pass; 0 < experts_us < verify_us: the experts' part."""
        rest_us = verify_us
        if 0.0 < experts_us < verify_us:
            rest_us -= experts_us
            self.experts.observe(n_tokens, experts_us)
        is_settled, switched_us = n_tokens == self._last_width, self._switched_us
        self._last_width, self._switched_us = n_tokens, None if is_settled else rest_us
        if is_settled:
            if switched_us is not None:
                self._learn_switch(switched_us - rest_us, rest_us)
            self.verify.observe(n_tokens, rest_us)
        elif self.switch_us < SMALL * rest_us or (self.verify.age(n_tokens) or OLD) >= OLD:
            self.verify.observe(n_tokens, max(rest_us - self.switch_us, 0.5 * rest_us))

    def _learn_switch(self, us: float, rest_us: float) -> None:
        """`us`: what a switched pass took more than the settled one after it; noise may make it < 0."""
        us = max(-rest_us, min(us, 2 * rest_us))
        self.switch_us = max(0.0, self.switch_us + SWITCH_GAIN * (us - self.switch_us))

    def verify_us(self, n_tokens: int, *, is_optimistic: bool = False) -> float | None:
        """One forward pass of `n_tokens`, experts included."""
        rest = self.verify.us(n_tokens, is_optimistic=is_optimistic)
        if rest is None:
            return None
        return rest + (self.experts.us(n_tokens, is_optimistic=is_optimistic) or 0.0)

    def step_us(self, n_draft: int, n_others: int = 0, *, is_optimistic: bool = False) -> float | None:
        """A whole step that drafts `n_draft` tokens, beside `n_others` tokens of other sequences."""
        verify = self.verify_us(1 + n_draft + n_others, is_optimistic=is_optimistic)
        if verify is None:
            return None
        process = self.process.us(1 + n_draft + n_others, is_optimistic=is_optimistic) or 0.0
        draft = (self.draft.us(n_draft) or 0.0) if n_draft else 0.0
        return draft + verify + process + (self.overhead.us(ANY_WIDTH) or 0.0)

    def cost(self, n_draft: int, n_others: int = 0, *, is_optimistic: bool = False) -> float | None:
        """T_step(n_draft) / T_step(0): cascade.txt, equation 2."""
        base = self.step_us(0, n_others)
        step = self.step_us(n_draft, n_others, is_optimistic=is_optimistic)
        return None if base is None or step is None else step / base

    def tolerance(self, n_tokens: int) -> float | None:
        """tau(n) = T(1) / T(n): gamma-tolerance.txt, section 3.1."""
        one, n = self.verify_us(1), self.verify_us(n_tokens)
        return None if one is None or n is None else one / n

    def delta(self) -> float | None:
        """T_draft(1) / T_verify(1): the drafter's cost per token; None before both were measured."""
        draft, verify = self.draft.us(1), self.verify_us(1)
        return None if draft is None or verify is None else draft / verify

    def to_dict(self) -> dict[str, Any]:
        """Microseconds by class and measured width."""
        return {
            name: {n: round(curve.us(n) or 0.0, 1) for n in curve.widths()}
            for name, curve in (
                ("draft_us", self.draft),
                ("verify_rest_us", self.verify),
                ("experts_us", self.experts),
                ("process_us", self.process),
                ("overhead_us", self.overhead),
            )
        }
