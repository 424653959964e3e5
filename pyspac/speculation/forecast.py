"""Our controller: forecast tokens per second of every draft length, with its uncertainty, and take the best.

Two curves are learned from every step: which drafts hold (`acceptance.py`) and what steps take
(`cost_table.py`). A third thing keeps count of what speculation has lost (`pyspac.ledger`). One rule: of
all lengths that the ledger can afford take the one with the highest E[tokens] / E[time], unless others have
a higher

    log(E[tokens] / E[time]) + appetite * its standard deviation

of which the one is tried that risks least. The appetite is how full the ledger is. At 1 the doubt counts in
favour, so what is not known is tried: that is how widths are measured, and how speculation begins again
after a while without a look, as evidence fades. The plain step is one of the lengths, and is measured again
when the gain hangs on a time that is not sure any more (not seen for long, or all times have moved since).
With an empty ledger nothing is drafted until it has earned something. A length need not be tried to be
judged, and a jump of T(n) is no hill to climb.

What else there is, and why:
- `ngram` has a length for each length of match (`match_forecast.py`);
- drafters end drafts by themselves, and each change of widths sets up a graph anew: E[time] has both;
- what a new length takes to begin with (a graph, caches, what the drafter has missed) is paid once, so two
  steps are taken before it is judged;
- a choice that differs from the present one must earn a change of widths while its evidence lasts;
- the first plain step after a draft is booked as speculation's, and is none to measure the plain step by;
- the others in a batch wait for our drafts, so tokens and losses are counted per batch;
- the next request's first guess at the acceptance is the mean of those before.

Each step is learned from as it is told of; the choice is made when it is asked for, so a scheduler that hears
of several steps at once chooses once.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Final

from pyspac.engine.step import StepRecord
from pyspac.ledger import LossLedger
from pyspac.speculation.acceptance import HALF_LIFE, AcceptanceCurve
from pyspac.speculation.choice import PLAIN, Choice, Option, Price, candidates, judged, pick
from pyspac.speculation.controller import Controller, Phase, Shared
from pyspac.speculation.cost_table import NOISE, SURPRISE, Estimate

# Plain steps that an accident may take and be charged: a lost time slice or a page from a disk, not a machine
# that slept. Where accidents hit only wide passes, 5 lost up to half of the time in replays and 10 a tenth;
# where another program comes and goes draft models gained half a percent less.
MOST_BOOKED: Final = 10.0
PLAIN_WEIGHT: Final = 0.01  # of a plain step, in what they take in the mean: accidents are one in a hundred


@dataclass(slots=True)
class ForecastMemory:
    """What all requests of a run share."""

    ledger: LossLedger = field(default_factory=LossLedger)
    plain_mean: float = 1.0  # what a plain step takes, accidents included, by what the table says
    n_drafts: int = 0  # seen
    n_held: int = 0  # of which the first token held

    def new_curve(self, n_max: int) -> AcceptanceCurve:
        """Of a new request, which begins with what drafts of others were worth."""
        return AcceptanceCurve(n_max, *((1.0, self.n_held / self.n_drafts) if self.n_drafts else (0.0, 0.0)))


class ForecastBase(Controller):
    """One request's choices: times, the ledger and the rule. What drafts are worth, a subclass learns."""

    name = "forecast"

    def __init__(self, shared: Shared) -> None:
        """Plain steps first, if what they take is not known yet."""
        super().__init__(shared)
        self.memory = shared.memory(ForecastMemory)
        self.lengths = candidates(self.n_draft_max)
        self._n_others = 0  # tokens of other sequences in the batch
        self._n_stood = 0  # steps since the choice
        self._is_due = True  # whether to choose again, when asked
        self._plain_us = 0.0  # a plain step, when the choice was made; 0: not known
        self._plain_doubt = 0.0  # standard deviation of its logarithm
        self._change = 0.0  # plain steps that a change of widths takes
        self._prices: list[Price] = []
        self._n_draft = 0
        self._phase: Phase = "choose"
        self._said: dict[str, tuple[int, Phase]] = {}  # by place: its last decision

    def next_n_draft(self) -> int:
        """See Controller."""
        if self._is_due:
            self._n_stood, self._is_due = 0, False
            self._choose()
        return self._n_draft

    # ------------------------------------------------------------------------------------ observing

    def observe(self, record: StepRecord) -> None:
        """See Controller. A new length is judged by its second step: the first takes more."""
        is_first = record.n_draft > 0 and (self.last is None or self.last.n_draft != record.n_draft)
        super().observe(record)
        self._n_stood += 1
        self._is_due = not is_first or self._n_stood > 1

    def _observe(self, record: StepRecord) -> None:
        self._n_others = record.n_others
        self._book(record)
        self._learn_drafts(record)

    @abstractmethod
    def _learn_drafts(self, record: StepRecord) -> None:
        """Take in which of its drafts held."""

    def _book(self, record: StepRecord) -> None:
        """Charge what the step took. A plain step is a loss only after a draft.

        Accidents are no part of the table's times. Plain steps have some, too: a step is charged beside
        what those take with theirs. All sequences of a batch tell of the same accident: each books a share.
        """
        n_others = record.n_others
        table = self.shared.table
        plain = table.step(0, n_others)
        usual = plain if record.is_plain else table.usual(record)
        if plain is None or usual is None:
            return  # no times are told
        more_us = min(record.total_us - usual.us, MOST_BOOKED * plain.us)
        n_steps = (usual.us + more_us / (1 + n_others)) / plain.us
        if record.is_plain and not self.was_drafting:
            self.memory.plain_mean += PLAIN_WEIGHT * (n_steps - self.memory.plain_mean)
            self.memory.ledger.book(1.0, 1.0, 1 + n_others)
        else:
            gained = self._gained(record.n_emitted)
            self.memory.ledger.book(n_steps / max(1.0, self.memory.plain_mean), gained, 1 + n_others)

    def _gained(self, n_tokens: float) -> float:
        """Plain steps that a batch with so many tokens of ours is worth: the others wait for ours, too."""
        return (self._n_others + n_tokens) / (self._n_others + 1)

    # ------------------------------------------------------------------------------------- choosing

    def _choose(self) -> None:
        """Decide the next steps' draft length. O(n_draft_max)."""
        if self.n_draft_max == 0:
            return self._set(Choice(0, "choose", [PLAIN], place="the cap is 0"))
        plain = self.shared.table.step(0, self._n_others)
        self._plain_us = plain.us if plain else 0.0
        if plain is None or (self._phase == "baseline" and plain.variance >= NOISE):
            return self._set(Choice(0, "baseline", [PLAIN]))
        self._prices, self._plain_doubt = self._price(plain), math.sqrt(plain.variance)
        self._change = 0.0 if self._n_others else self.shared.table.change_us() / plain.us
        return self._choose_priced()

    @abstractmethod
    def _choose_priced(self) -> None:
        """Choose, now that prices are known."""

    def _price(self, plain: Estimate) -> list[Price]:
        """All lengths above 0, ascending."""
        table, prices, cost = self.shared.table, [], 1.0
        for k in self.lengths:
            step = table.step(k, self._n_others) or plain
            cost = max(cost, step.us / plain.us)
            most = max(step.us, table.one_by_one_us(k, plain, self._n_others))
            far = min(math.exp(SURPRISE * math.sqrt(step.variance)), most / step.us)
            prices.append(Price(k, cost, step.variance, far))
        return prices

    def _set(self, choice: Choice) -> None:
        self._phase, self._n_draft = choice.phase, choice.n_draft
        self._say(choice)

    def _say(self, choice: Choice) -> None:
        """Keep it among the decisions, if it is another one than the last for its place."""
        decided = choice.n_draft, choice.phase
        if self._said.get(choice.place) != decided:
            self._said[choice.place] = decided
            self._decide(choice.phase, choice.n_draft, utilities=choice.utilities, why=choice.why)


class Forecast(ForecastBase):
    """With one length for the whole text."""

    def __init__(self, shared: Shared) -> None:
        """See ForecastBase."""
        super().__init__(shared)
        self.acceptance = self.memory.new_curve(shared.n_draft_max)

    def _learn_drafts(self, record: StepRecord) -> None:
        """See ForecastBase."""
        is_beginning = record.n_draft == 0 and not record.is_plain  # it drafts, for the next step
        if not is_beginning:
            self.acceptance.observe(self._n_draft, record.n_draft, record.n_accepted)
            self.memory.n_drafts += record.n_draft > 0
            self.memory.n_held += record.n_accepted > 0

    def _choose_priced(self) -> None:
        """See ForecastBase."""
        self._set(pick(self._judge(self._n_draft), self.memory.ledger))

    def _judge(self, n_last: int) -> list[Option]:
        """All lengths, the plain step first; `n_last`: the present one. Costs are in plain steps."""
        tokens, chances, doubt = self.acceptance.forecast()
        appetite, change = self.memory.ledger.appetite(), self._change
        n_missed = 0 if n_last else self.n_missed
        stays = 1.0 / (1.0 + change / HALF_LIFE * (n_last > 0))
        options = [Option(0, stays, math.log(stays) + appetite * self._plain_doubt, 0.0)]
        # of drafts that the drafter ends before k: their cost, times their chances, and the chance that two
        # in a row end alike; `longer`: the chance of all others
        longer = chances[1]
        shorter = 1.0 - longer
        alike = shorter * shorter
        for price in self._prices:
            k = price.n_draft
            cost = shorter + longer * price.cost + change * (1.0 - alike - longer * longer)
            once = (change + self.shared.table.backlog_us(n_missed, k) / self._plain_us) * (k != n_last)
            cost += once / HALF_LIFE  # it is earned while the choice's evidence lasts
            gained = self._gained(tokens[k])
            unsure = doubt * (gained - 1.0)
            options.append(judged(price, gained, unsure, cost, appetite, once))
            if k < self.n_draft_max:
                ends, longer = longer - chances[k + 1], chances[k + 1]
                shorter += ends * price.cost
                alike += ends * ends
        return options
