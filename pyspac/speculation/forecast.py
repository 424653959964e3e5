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
- drafters end drafts by themselves, and a plain step between drafts sets up its graph anew: E[time] has both;
- the first plain step after a draft is booked as speculation's, and is none to measure the plain step by;
- the others in a batch wait for our drafts, so tokens and losses are counted per batch;
- the next request's first guess at the acceptance is the mean of those before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from pyspac.engine.step import StepRecord
from pyspac.speculation.acceptance import AcceptanceCurve
from pyspac.speculation.controller import Controller, Phase, Shared
from pyspac.speculation.cost_table import FAR, NOISE, Estimate
from pyspac.speculation.ledger import LossLedger


@dataclass(slots=True)
class ForecastMemory:
    """What all requests of a run share."""

    ledger: LossLedger = field(default_factory=LossLedger)
    n_drafts: int = 0
    n_held: int = 0  # of them, those whose first token held


class Option(NamedTuple):
    """A draft length, as far as it is known."""

    n_draft: int
    utility: float  # tokens per second over those of plain steps: cascade.txt, equation 3
    doubt: float  # standard deviation of log(utility); the plain step's own is option 0's
    loss: float  # plain steps that a step of it may lose, if it goes badly


class Forecast(Controller):
    """One request's choices."""

    name = "forecast"
    wants_shadow = True

    def __init__(self, shared: Shared) -> None:
        """Plain steps first, if the plain step's time is not known yet."""
        super().__init__(shared)
        self.memory = shared.memory(ForecastMemory)
        n, held = self.memory.n_drafts, self.memory.n_held
        self.acceptance = AcceptanceCurve(self.n_draft_max, *((1.0, held / n) if n else ()))
        self.utilities: dict[int, float] = {0: 1.0}
        self._has_shadow = False
        self._n_others = 0  # tokens of other sequences in the batch
        self._n_draft = 0
        self._phase: Phase = "baseline"
        self._choose()

    def next_n_draft(self) -> int:
        return self._n_draft

    # ------------------------------------------------------------------------------------ observing

    def _observe(self, record: StepRecord) -> None:
        self._n_others = record.n_others
        self._book(record)
        if self._n_draft > 0 or not self._has_shadow:
            self._learn(self._n_draft, record.n_draft, record.n_accepted)
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
            most_us = usual.us * math.exp(FAR * math.sqrt(NOISE))
            n_steps = min(record.total_us, most_us) / plain.us
            n_gained = self._gained(record.n_emitted)
        self.memory.ledger.book(n_steps, n_gained, 1 + n_others)

    def _gained(self, n_tokens: float) -> float:
        """Plain steps that a batch with so many tokens of ours is worth: the others wait for ours, too."""
        return (self._n_others + n_tokens) / (self._n_others + 1)

    # ------------------------------------------------------------------------------------- choosing

    def _choose(self) -> None:
        """Decide the next step's draft length. O(n_draft_max)."""
        if self.n_draft_max == 0:
            return self._set(0, "choose", "the cap is 0")
        plain = self.shared.table.step(0, self._n_others)
        if plain is None:
            return self._set(0, "baseline", "nothing was measured")
        if self._phase == "baseline" and self.was_drafting:
            return None  # the first plain step after a draft is none to measure: one more
        options, ledger = self._options(plain), self.memory.ledger
        appetite = ledger.appetite()
        options.sort(key=lambda option: math.log(option.utility) + appetite * option.doubt, reverse=True)
        best = next(option for option in options if option.n_draft == 0 or ledger.can_lose(option.loss))
        self.utilities = {option.n_draft: option.utility for option in options}
        return self._set(best.n_draft, *self._reason(best, options[0]))

    def _options(self, plain: Estimate) -> list[Option]:
        """What there is to choose from: all lengths, none included."""
        table, n_others = self.shared.table, self._n_others
        tokens, chances, doubt = self.acceptance.forecast()
        options = [Option(0, 1.0, math.sqrt(plain.variance), 0.0)]
        price = 1.0
        # what drafts cost that the drafter ends before k tokens, times their chances
        shorter = (1.0 - chances[1]) * (1.0 + chances[1] * table.return_us(n_others) / plain.us)
        for k in range(1, self.n_draft_max + 1):
            step = table.step(k, n_others) or plain
            price = max(price, step.us / plain.us)  # no step is shorter than one with fewer tokens
            cost, variance = shorter + chances[k] * price, step.variance
            gained = self._gained(tokens[k])
            unsure = 0.0 if self._has_shadow else doubt * (gained - 1.0)
            loss = cost * math.exp(FAR * math.sqrt(variance)) - (gained - unsure)
            options.append(Option(k, gained / cost, math.sqrt(variance + (unsure / gained) ** 2), loss))
            shorter += (chances[k] - chances[k + 1]) * price if k < self.n_draft_max else 0.0
        return options

    def _reason(self, best: Option, first: Option) -> tuple[Phase, str]:
        """What a choice is called, and why; `first`: what it would have been with a full ledger."""
        likeliest = max(self.utilities, key=lambda k: self.utilities[k])
        if best.n_draft == 0 and first.n_draft > 0:
            return "hold", f"the loss ledger does not allow K = {first.n_draft}, which may pay"
        if best.n_draft == likeliest:
            return "choose", "the best forecast"
        if best.n_draft == 0:
            return "baseline", "the plain step's time is not sure"
        return "probe", f"may be better than K = {likeliest}: that is not sure"

    def _set(self, n_draft: int, phase: Phase, why: str) -> None:
        if (phase, n_draft) != (self._phase, self._n_draft) or not self.decisions:
            self._decide(phase, n_draft, utilities=dict(self.utilities), why=why)
        self._phase, self._n_draft = phase, n_draft
