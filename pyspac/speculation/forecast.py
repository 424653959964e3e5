"""Our controller: forecast tokens per second of every draft length, with its uncertainty, and take the best.

Two curves are learned from every step: which drafts hold (`acceptance.py`) and what steps take
(`cost_table.py`). A third thing keeps count of what speculation has lost (`ledger.py`). One rule: of all
lengths that the ledger can afford take the one with the highest

    log(E[tokens] / E[time]) + appetite * its standard deviation

The appetite is how full the ledger is. At 1 the doubt counts in favour, so what is not known is tried: that
is how widths are measured, and how speculation begins again after a while without a look, as evidence fades.
The plain step is one of the lengths, and is measured again when the gain hangs on a time that is not sure
any more (not seen for long, or all times have moved since). With an empty ledger nothing is drafted until it
has earned something. A length need not be tried to be judged, and a jump of T(n) is no hill to climb.

What else there is, and why:
- with a drafter that costs nothing (n-gram), drafts are compared with the text while speculation is off (the
  shadow), so that acceptance is never in doubt;
- drafters end drafts by themselves, and each change of widths sets up a graph anew: E[time] has both;
- a choice that differs from the present one must earn a change of widths while its evidence lasts;
- the first plain step after a draft is booked as speculation's, and is none to measure the plain step by;
- the others in a batch wait for our drafts, so tokens and losses are counted per batch;
- the next request's first guess at the acceptance is the mean of those before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from pyspac.engine.step import StepRecord
from pyspac.speculation.acceptance import HALF_LIFE, AcceptanceCurve
from pyspac.speculation.controller import Controller, Phase, Shared
from pyspac.speculation.cost_table import FAR, NOISE, Estimate
from pyspac.speculation.ledger import LossLedger

# A choice is kept for so long, unless it loses a plain step before. Choosing takes 100 us with cold caches,
# as between two passes: at most 2 % of the time.
CHOICE_US: Final = 6_000.0


@dataclass(slots=True)
class ForecastMemory:
    """What all requests of a run share."""

    ledger: LossLedger = field(default_factory=LossLedger)
    n_drafts: int = 0
    n_held: int = 0  # of them, those whose first token held


def candidates(n_max: int) -> list[int]:
    """1 2 3 5 8 13 ... and the cap: lengths between two of them gain too little to change widths for."""
    lengths, k, after = [], 1, 2
    while k < n_max:
        lengths.append(k)
        k, after = after, k + after
    return [*lengths, n_max] if n_max else []


class Forecast(Controller):
    """One request's choices."""

    name = "forecast"
    wants_shadow = True

    def __init__(self, shared: Shared) -> None:
        """Plain steps first, if what they take is not known yet."""
        super().__init__(shared)
        self.memory = shared.memory(ForecastMemory)
        n, held = self.memory.n_drafts, self.memory.n_held
        self.acceptance = AcceptanceCurve(self.n_draft_max, *((1.0, held / n) if n else ()))
        self.lengths = candidates(self.n_draft_max)
        self.utilities: dict[int, float] = {0: 1.0}
        self._has_shadow = False
        self._n_others = 0  # tokens of other sequences in the batch
        self._chosen_us = 0.0  # time for which the choice was kept
        self._chosen_level = 0.0  # of the ledger, when it was made
        self._n_draft = 0
        self._phase: Phase = "choose"
        self._choose()

    def next_n_draft(self) -> int:
        return self._n_draft

    # ------------------------------------------------------------------------------------ observing

    def _observe(self, record: StepRecord) -> None:
        self._n_others = record.n_others
        self._book(record)
        if self._n_draft > 0 or not self._has_shadow:
            self._learn(self._n_draft, record.n_draft, record.n_accepted)
        self._chosen_us += record.total_us
        has_lost = self.memory.ledger.level < self._chosen_level - 1.0
        if self._chosen_us >= CHOICE_US or has_lost or self._phase == "baseline":
            self._choose()

    def observe_shadow(self, n_draft: int, n_held: int) -> None:
        """See Controller."""
        self._has_shadow = True
        self._learn(self.n_draft_max, n_draft, n_held)

    def _learn(self, n_asked: int, n_draft: int, n_held: int) -> None:
        self.acceptance.observe(n_asked, n_draft, n_held)
        self.memory.n_drafts += n_draft > 0
        self.memory.n_held += n_held > 0

    def _book(self, record: StepRecord) -> None:
        """Charge what the step took, but for accidents. A plain step is a loss only after a draft."""
        n_others = record.n_others
        n_steps = n_gained = 1.0
        if record.n_draft or self.was_drafting:
            table = self.shared.table
            plain, usual = table.step(0, n_others), table.step(record.n_draft, n_others)
            if plain is None or usual is None:
                return  # no times are told
            most_us = usual.us * math.exp(FAR * math.sqrt(NOISE)) + table.change_us()
            n_steps = min(record.total_us, most_us) / plain.us
            n_gained = self._gained(record.n_emitted)
        self.memory.ledger.book(n_steps, n_gained, 1 + n_others)

    def _gained(self, n_tokens: float) -> float:
        """Plain steps that a batch with so many tokens of ours is worth: the others wait for ours, too."""
        return (self._n_others + n_tokens) / (self._n_others + 1)

    # ------------------------------------------------------------------------------------- choosing

    def _choose(self) -> None:
        """Decide the next steps' draft length. O(n_draft_max), some 20 us; 100 with cold caches."""
        self._chosen_us, self._chosen_level = 0.0, self.memory.ledger.level
        if self.n_draft_max == 0:
            return self._set(0, "choose", "the cap is 0")
        plain = self.shared.table.step(0, self._n_others)
        if plain is None or (self._phase == "baseline" and plain.variance >= NOISE):
            return self._set(0, "baseline", "the plain step's time is not sure")
        best, first = self._judge(plain)
        return self._set(best, *self._reason(best, first))

    def _judge(self, plain: Estimate) -> tuple[int, int]:
        """The best length that the ledger allows, and the best with a full one. Costs are in plain steps."""
        table, ledger, n_others = self.shared.table, self.memory.ledger, self._n_others
        tokens, chances, doubt = self.acceptance.forecast()
        appetite = ledger.appetite()
        change = 0.0 if n_others else table.change_us() / plain.us
        move = change / HALF_LIFE  # a choice earns what it takes to come to it while its evidence lasts
        utility = 1.0 / (1.0 + move * (self._n_draft > 0))
        best = first = 0
        best_score = first_score = math.log(utility) + appetite * math.sqrt(plain.variance)
        self.utilities = {0: utility}
        # of drafts that the drafter ends before k: their cost, times their chances, and the chance that two
        # in a row end alike; `longer`: the chance of all others
        longer = chances[1]
        shorter = 1.0 - longer
        alike = shorter * shorter
        price = 1.0
        for k in self.lengths:
            step = table.step(k, n_others) or plain
            price = max(price, step.us / plain.us)  # no step is shorter than one with fewer tokens
            cost = shorter + longer * price + change * (1.0 - alike - longer * longer)
            cost += move * (k != self._n_draft)
            gained = self._gained(tokens[k])
            unsure = 0.0 if self._has_shadow else doubt * (gained - 1.0)
            self.utilities[k] = utility = gained / cost
            score = math.log(utility) + appetite * math.sqrt(step.variance + (unsure / gained) ** 2)
            if score > first_score:
                first, first_score = k, score
            if score > best_score:
                loss = cost * math.exp(FAR * math.sqrt(step.variance)) - (gained - unsure)
                if ledger.can_lose(loss):
                    best, best_score = k, score
            if k < self.n_draft_max:
                ends, longer = longer - chances[k + 1], chances[k + 1]
                shorter += ends * price
                alike += ends * ends
        return best, first

    def _reason(self, best: int, first: int) -> tuple[Phase, str]:
        """What a choice is called, and why; `first`: what it would have been with a full ledger."""
        likeliest = max(self.utilities, key=self.utilities.__getitem__)
        if best == 0 and first > 0:
            return "hold", f"the loss ledger does not allow K = {first}, which may pay"
        if best == likeliest:
            return "choose", "the best forecast"
        if best == 0:
            return "baseline", "the plain step's time is not sure"
        return "probe", f"may be better than K = {likeliest}: that is not sure"

    def _set(self, n_draft: int, phase: Phase, why: str) -> None:
        if (phase, n_draft) != (self._phase, self._n_draft) or not self.decisions:
            self._decide(phase, n_draft, utilities=dict(self.utilities), why=why)
        self._phase, self._n_draft = phase, n_draft
