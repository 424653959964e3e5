"""The measured fallback: whether copies pay here, found out by doing without them for a while.

What a copy takes is known; what it does to everybody else on the memory bus, and what it gains once the text
goes on, is not. So now and then another way has its turn:

    copies    experts come and go, beside the layers that are predicted to be better whole
    split     the same without whole layers
    frozen    the resident set stays as it is
    whole     only whole layers, as many as fit

    wait -> settle -> try -> return -> check     a round; then another one, or a decision, and wait again

A round compares the steps of `try`, in the other way, with those of the present way before and after it, so
that what drifts (a longer context) is no difference. Two other ways are tried in turn. What is faster for
sure is kept, and the wait doubles each time the present way wins. A ledger bounds what trials lose; one that
cannot be afforded ends at once.

A set that was frozen grows stale only later: so, as for any other change, the present way's times are
watched, and a trial comes early when they have risen since the last one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import Any, Final, Literal

from pyspac.engine.board import FALLBACKS
from pyspac.engine.step import StepRecord
from pyspac.ledger import CAPACITY, LossLedger
from pyspac.scheduler.paired_timing import OUTLIER_RATIO, Ratio, Sample, compare, mean_times, pooled

PlacementMode = Literal["copies", "frozen", "whole", "split"]

# All lengths are in steps: what copies gain and lose comes with steps, whether they take 1 ms or 100.
# until copies under way have ended, and those that a way wants at once were made: half of what ema remembers
N_SETTLE: Final = 16
# as many as ema remembers, and a copy has to pay within: with N_SETTLE before them the set is out of date by
# then, if routing moves at all. Noise of 10 % leaves a doubt of 2 % in a round.
N_TRY: Final = 32
N_PLACE: Final = 512  # until layers must be whole, or no longer: else the trial ends
MAX_ROUNDS: Final = 4  # of a trial: then the doubt is 1 %, and what differs by less is not worth finding out
MIN_ROUNDS: Final = 2  # to leave the present way: one round may have met another request, or another program
N_SIGMA: Final = 2.0  # of doubt; a wrong choice among near equals costs little, and is looked at again
MARGIN: Final = 0.01  # of a step's time, that a change must gain
WAIT: Final = (256, 4096)  # steps between trials, first and at most: a trial is a tenth of the first wait
# by which the present way's times rise before a trial comes early; and a gain with more doubt is not told
CHANGED: Final = 0.05
SHARE: Final = 0.01  # of all time, that trials may lose; with the ledger's capacity, 2 % of 500 steps


class Fallback:
    """Says which way to run; told of every step."""

    def __init__(self) -> None:
        """Begin with copies, which fill the device."""
        self.chosen: PlacementMode = "copies"
        self.gain: float | None = (
            None  # tokens/s of the chosen way against the other's, less 1; None: not known
        )
        self.n_trials = 0
        self.n_switches = 0
        self.ledger = LossLedger(share=SHARE)
        self._begins_with: PlacementMode = "copies"  # once the device is full: what was remembered
        self._wait = WAIT[0]
        self._recent: deque[Sample] = deque(maxlen=N_TRY)  # of the present way
        self._usual: list[Sample] = []  # of the present way, when it was chosen
        self._has_copied = False  # since the last trial
        self._rounds: list[Ratio] = []  # of the trial: the other way against the present one
        self._n_rounds = 0
        self._other: PlacementMode = "frozen"  # that the trial tries
        self._known: dict[PlacementMode, deque[Ratio]] = {}  # the same by way, since the choice was made
        self._moved = 0.0  # steps until the layers were whole, or no longer
        self._can_be_whole = self._has_whole = False
        self._left = 0.0  # steps of the phase
        self._before: list[Sample] = []
        self._tried: list[Sample] = []
        self._expected: dict[Any, float] = {}  # of the present way by kind, microseconds
        self._enter("wait", self._wait)

    @property
    def way(self) -> PlacementMode:
        """How the next step runs."""
        return self._other if self._phase in ("settle", "try") else self.chosen

    def observe(
        self,
        steps: Iterable[StepRecord],
        *,
        n_forward: int,
        loaded_bytes: int,
        is_full: bool,
        can_be_whole: bool = False,
        has_whole: bool = False,
        is_in_place: bool = True,
    ) -> None:
        """Take in what happened since the last call: steps of one way.

        Sequences of one batch have a record each: `n_forward` says how many passes there were. `is_full`:
        no load waits for a free slot. `can_be_whole`: only whole layers may be as fast; `has_whole`: some are
        beside copies; `is_in_place`: those layers are whole that the way of these steps asks for.
        """
        samples = [Sample((step.width, step.n_draft), step.total_us) for step in steps if step.total_us > 0.0]
        if not samples:
            return
        self._has_copied |= loaded_bytes > 0
        self._can_be_whole, self._has_whole = can_be_whole, has_whole
        if self.chosen == "whole" and not can_be_whole:
            self.chosen, self.gain, self._known = "copies", None, {}
            self._rest([])
        share = min(1.0, max(n_forward, 1) / len(samples))  # of a pass, that each is
        for sample in samples:
            self._take(sample, share)
        self._left -= share * len(samples)
        if self._phase == "settle" and not is_in_place and self._left <= 0.0 < N_PLACE - self._moved:
            self._moved += max(-self._left, share)
            self._left = share  # and look again
        self._advance(is_full)

    def _take(self, sample: Sample, share: float) -> None:
        lost = 0.0
        if self._phase in ("wait", "check"):
            self._recent.append(sample)
        elif usual_us := self._expected.get(sample.kind):
            lost = min(sample.us / usual_us, OUTLIER_RATIO) - 1.0
        if self._phase == "try":
            self._tried.append(sample)
        self.ledger.book(share * (1.0 + lost), share)

    def _enter(self, phase: Literal["wait", "settle", "try", "return", "check"], n_steps: float) -> None:
        self._phase = phase
        self._left = n_steps

    def _advance(self, is_full: bool) -> None:
        is_over, is_broke = self._left <= 0.0, self.ledger.level <= 0.0
        match self._phase:
            case "wait":
                self._wait_on(is_full, is_over)
            case "settle" | "try" if is_broke:
                self._enter("return", N_SETTLE + self._moved)
            case "settle" if is_over:
                self._enter("try", N_TRY)
            case "try" if is_over:
                self._enter("return", N_SETTLE + self._moved)  # what had to go is copied back
            case "return" if is_over:
                self._recent.clear()
                self._enter("check", N_TRY)
            case "check" if is_over:
                self._end_round()

    def _wait_on(self, is_full: bool, is_over: bool) -> None:
        if not is_full or len(self._recent) < N_TRY:
            return
        can_begin = self._begins_with != "whole" or self._can_be_whole
        if self._begins_with != self.chosen and can_begin and (is_over or self.n_trials > 0):
            self.chosen = self._begins_with
            self._rest([])
            return
        others = self._others()
        if others and self.ledger.level >= 0.5 * CAPACITY and (is_over or self._has_slowed()):
            new = [way for way in others if way not in self._known]
            self._other = new[0] if new else others[self.n_trials % len(others)]
            self.n_trials += 1
            self._rounds, self._n_rounds = [], 0
            self._begin_round()

    def _others(self) -> list[PlacementMode]:
        """What may differ from the present way."""
        others: list[PlacementMode] = []
        if self.chosen != "copies":
            others.append("copies")
        elif self._has_copied:
            others.append("frozen")
        if self.chosen == "copies" and self._has_whole:
            others.append("split")
        if self.chosen != "whole" and self._can_be_whole:
            others.append("whole")
        return others

    def _has_slowed(self) -> bool:
        """Whether the present way takes longer than when it was chosen; never sooner than a first wait."""
        if self._wait - self._left < WAIT[0] or int(self._left) % N_TRY:  # as often as there is news
            return False
        if not self._usual:
            self._usual = list(self._recent)
        return _rose(self._usual, self._recent)

    def _begin_round(self) -> None:
        self._before, self._tried, self._moved = list(self._recent), [], 0.0
        self._expected = {kind: us for kind, (us, _, _) in mean_times(self._before).items()}
        self._enter("settle", N_SETTLE)

    def _end_round(self) -> None:
        self._n_rounds += 1
        ratio = compare(self._tried, [*self._before, *self._recent])
        known = self._known.setdefault(self._other, deque(maxlen=2 * MAX_ROUNDS))
        if ratio is not None:
            self._rounds.append(ratio)
            known.append(ratio)
        found = pooled(self._rounds)
        if ratio is not None and (_is_won(self._rounds) or _is_won(list(known))):
            self._switch()
            return
        is_sure = found is not None and found.is_above(0.0, N_SIGMA)
        if is_sure or self._n_rounds >= MAX_ROUNDS or self.ledger.level < 0.5 * CAPACITY:
            if all(way in self._known for way in self._others()):
                self._wait = min((1 + is_sure) * self._wait, WAIT[1])
            has_risen = _rose(self._before, self._recent)  # not yet as before, or something else changed
            self._rest(self._before if has_risen else list(self._recent))
        else:
            self._begin_round()

    def _switch(self) -> None:
        left, known = self.chosen, self._known[self._other]
        self.chosen = self._begins_with = self._other
        self.n_switches += 1
        won = self._rounds if _is_won(self._rounds) else list(known)
        self._known = {left: deque((ratio.reversed() for ratio in won), maxlen=known.maxlen)}
        if found := pooled(list(self._known[left])):
            self.gain = math.expm1(found.log)
        self._wait = WAIT[0]
        self._rest(list(self._tried))

    def _rest(self, usual: list[Sample]) -> None:
        """Wait for the next trial; `usual`: times of the present way."""
        self._usual = usual
        self._recent.clear()
        self._has_copied = False
        known = [found for ratios in self._known.values() if (found := pooled(list(ratios)))]
        sure = [found.log for found in known if found.variance < CHANGED**2]
        if sure:
            self.gain = math.expm1(min(sure))  # against the best of the others
        self._enter("wait", self._wait)

    def remember(self, way: PlacementMode, gain: float | None) -> None:
        """Start from what an earlier run found: it is taken up once the device is full."""
        self._begins_with, self.gain = way, gain

    def to_row(self) -> tuple[int, int]:
        """Return the board's `fallback`."""
        if self.gain is None:
            return 0, 0
        return FALLBACKS.index(self.chosen), round(1e3 * self.gain)

    def to_dict(self) -> dict[str, Any]:
        """`copies` of the `--json` object."""
        return {
            "chosen": self.chosen,
            "gain": self.gain,
            "n_trials": self.n_trials,
            "n_switches": self.n_switches,
        }


def copies_text(found: dict[str, Any]) -> str:
    """What was found, for people: `chosen` and `gain` of `Fallback.to_dict`."""
    percent = f"{abs(found['gain']):.1%} {'faster' if found['gain'] >= 0 else 'slower'}"
    if found["chosen"] == "frozen":
        return f"left out: steps without them are {percent}"
    if found["chosen"] == "whole":
        return f"of only whole layers: steps with them are {percent}"
    if found["chosen"] == "split":
        return f"go on, and no layer is whole: steps are {percent}"
    return f"go on: steps with them are {percent}"


def _is_won(rounds: list[Ratio]) -> bool:
    """Whether the other way is faster for sure, in rounds of one trial, or of several where noise is high."""
    found = pooled(rounds)
    return found is not None and len(rounds) >= MIN_ROUNDS and found.reversed().is_above(MARGIN, N_SIGMA)


def _rose(before: Iterable[Sample], after: Iterable[Sample]) -> bool:
    """Whether times are longer than they were, for sure and by enough to matter."""
    ratio = compare(after, before)
    return ratio is not None and ratio.is_above(CHANGED, N_SIGMA)
