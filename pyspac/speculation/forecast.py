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
- drafts of llama.cpp's n-gram drafters, which cost nothing, are compared with the text while speculation is
  off (the shadow), so that their acceptance is never in doubt;
- `ngram` has a length for each place in the text (`placed_forecast.py`);
- drafters end drafts by themselves, and each change of widths sets up a graph anew: E[time] has both;
- what a new length takes to begin with (a graph, caches, what the drafter has missed) is paid once, so two
  steps are taken before it is judged; while a choice stands, steps are put down and learned from later,
  and plain ones need not be told of before (a rest);
- a choice that differs from the present one must earn a change of widths while its evidence lasts;
- the first plain step after a draft is booked as speculation's, and is none to measure the plain step by;
- the others in a batch wait for our drafts, so tokens and losses are counted per batch;
- the next request's first guess at the acceptance is the mean of those before.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from pyspac.engine.step import StepRecord
from pyspac.ledger import LossLedger
from pyspac.speculation.acceptance import GUESS, HALF_LIFE, AcceptanceCurve
from pyspac.speculation.choice import PLAIN, Choice, Option, Price, candidates, judged, pick
from pyspac.speculation.controller import Controller, Phase, Shared
from pyspac.speculation.cost_table import NOISE, SURPRISE, Estimate

# A choice is kept for so long at most, unless it loses a plain step before: one step at first, and twice as
# long each time that it is confirmed. Choosing takes 250 us with cold caches, as between two passes: 0.8 % of
# the time. In replays of texts draft models gained up to 0.8 % with 15 ms, n-grams nothing. Steps are
# gathered meanwhile.
CHOICE_US: Final = 30_000.0
# A plain step is chosen for so long, at first and at most, if no shadow tells of drafts meanwhile: only time
# changes what is thought of them. In replays 7.5 and 30 ms at first were as good, and 120 at most. `ngram`
# keeps its choices for the latter, unless its last step drafted (placed_forecast.py).
REST_US: Final = (15_000.0, 60_000.0)
N_REST_MAX: Final = 1000  # steps; of a time near 0 it would be tens of thousands, whatever they take then
# Plain steps that an accident may take and be charged: a lost time slice or a page from a disk, not a machine
# that slept. Where accidents hit only wide passes, 5 lost up to half of the time in replays and 10 a tenth;
# where another program comes and goes draft models gained half a percent less.
MOST_BOOKED: Final = 10.0
# Plain steps behind plain steps that are looked at, the last ones since the choice; the others are passed
# over. As many as it takes to believe that all passes take three times as long now.
N_LOOKED_AT: Final = 8
# How many times as long as thought a step may take, for what is charged in advance. Without a bound a width
# that was not seen for long costs more than a full ledger allows, and is never measured again. In replays
# with a program that comes and goes drafts came back with 2 to 6; with 2 and 3 n-grams gained one percent
# less.
FARTHEST: Final = 4.0
PLAIN_WEIGHT: Final = 0.01  # of a plain step, in what they take in the mean: accidents are one in a hundred


@dataclass(slots=True)
class ForecastMemory:
    """What all requests of a run share."""

    ledger: LossLedger = field(default_factory=LossLedger)
    plain_mean: float = 1.0  # what a plain step takes, accidents included, by what the table says
    # place -> how many drafts were seen, and of how many the first token held
    seen: dict[int, tuple[int, int]] = field(default_factory=dict)

    def new_curve(self, n_max: int, place: int = 0, guess: float = GUESS) -> AcceptanceCurve:
        """Of a new request, which begins with what drafts of others were worth in such a place."""
        n, n_held = self.seen.get(place, (0, 0))
        return AcceptanceCurve(n_max, *((1.0, n_held / n) if n else (0.0, 0.0)), guess)


class ForecastBase(Controller):
    """One request's choices: times, the ledger and the rule. What drafts are worth, a subclass learns."""

    name = "forecast"

    def __init__(self, shared: Shared) -> None:
        """Plain steps first, if what they take is not known yet.

        It chooses at once, so a subclass has its curves before it calls this.
        """
        super().__init__(shared)
        self.memory = shared.memory(ForecastMemory)
        self.memory.ledger.begin_request()
        self.lengths = candidates(self.n_draft_max)
        self._is_watched = False  # whether there are drafts in the shadow
        self._has_shadow = False  # whether it told of a draft
        self._n_others = 0  # tokens of other sequences in the batch
        self._gathered: list[StepRecord] = []  # steps since the choice
        self._stood_us = 0.0  # they took
        self._balance = 0.0  # what they gained, in plain steps
        self._keep_us = 0.0  # for which the choice is kept: doubles as it is confirmed
        self._plain_us = 0.0  # a plain step, when it was made; 0: not known
        self._plain_doubt = 0.0  # standard deviation of its logarithm
        self._change = 0.0  # plain steps that a change of widths takes
        self._prices: list[Price] = []
        self._n_draft = 0
        self._phase: Phase = "choose"
        self._said: dict[str, tuple[int, Phase]] = {}  # by place: its last decision
        self._choose()
        if self._is_sure():
            self._keep_us = self._time_to_keep(0.0)
            self._rest()

    def next_n_draft(self) -> int:
        return self._n_draft

    # ------------------------------------------------------------------------------------ observing

    def observe(self, record: StepRecord) -> None:
        """See Controller. While the choice stands, a step is put down and no more between two passes."""
        us = record.total_us
        self._gathered.append(record)
        self._stood_us += us
        if self._plain_us:
            self._balance += self._gained(record.n_emitted) - us / self._plain_us
        if self._is_due(record) and not (record.n_draft and self._is_first_of_length()):
            self._reconsider()

    def _is_due(self, record: StepRecord) -> bool:
        """Whether to choose again."""
        if self.n_rest and self._n_draft == 0:
            return record.width > 1 or len(self._gathered) >= self.n_rest
        return self._stood_us >= self._keep_us or self._balance < -1.0

    def _is_first_of_length(self) -> bool:
        """Whether the step was the first of a new length: the second tells what it takes from then on."""
        return len(self._gathered) == 1 and (self.last is None or self.last.n_draft != self._n_draft)

    def _reconsider(self) -> None:
        """Learn from what was gathered, and choose again."""
        stood_us, before = self._stood_us, self._n_draft
        is_sure = self._is_sure()
        self.learn_gathered()
        self._choose()
        is_kept = self._n_draft == before and is_sure
        self._keep_us = self._time_to_keep(2.0 * stood_us) if is_kept else 0.0
        self._rest()

    def _time_to_keep(self, us: float) -> float:
        """`us`, within what is allowed of such a choice."""
        if self._n_draft == 0 and not (self._is_watched or self._has_shadow):
            least, most = REST_US
            return max(least, min(us, most))
        return min(us, CHOICE_US)

    def _rest(self) -> None:
        """Have plain steps told of together, where they are no news."""
        can_rest = self._can_pass_over() and self._plain_us and not self._n_others
        self.n_rest = min(math.ceil(self._keep_us / self._plain_us), N_REST_MAX) if can_rest else 0

    def _is_sure(self) -> bool:
        """Whether the choice that was kept so far may be kept for longer, if it is the next one, too."""
        return self._phase != "baseline"

    def learn_gathered(self) -> None:
        """See Controller."""
        self.compare_shadow()
        gathered, self._gathered = self._gathered, []  # first: an interrupt must not have one learned twice
        passed, n = dict.fromkeys(self._alike(gathered)[:-N_LOOKED_AT]), 0
        for i, record in enumerate(gathered):
            if i in passed:
                n += 1
                continue
            if n:
                self._pass_over(n)
                n = 0
            self._learn_step(record)
        self._learn_mean([gathered[i].total_us for i in passed])
        self._stood_us = self._balance = 0.0

    def _alike(self, gathered: list[StepRecord]) -> list[int]:
        """Which of these steps are plain ones behind plain ones: the last of them tell enough."""
        if not self._can_pass_over():
            return []
        before, alike = self.was_drafting, []
        for i, record in enumerate(gathered):
            if not (before or record.width > 1):
                alike.append(i)
            before = record.width > 1
        return alike

    def _can_pass_over(self) -> bool:
        """Whether plain steps are no news, but for what they take."""
        return self._n_draft == 0

    def _pass_over(self, n: int) -> None:
        """Take in so many plain steps behind plain steps, but for what they take."""
        self.shared.table.pass_over(n)
        self.memory.ledger.book(n, n)
        self._fade(n)
        self.n_missed += n
        self.n_steps += n

    def _learn_mean(self, times: list[float]) -> None:
        """Take in what plain steps took in the mean, accidents included, by what was usual around them.

        By the table's time they would all be accidents if another program has come.
        """
        for first in range(0, len(times), N_LOOKED_AT):
            some = sorted(times[first : first + N_LOOKED_AT])
            if usual := some[len(some) // 2]:
                most = (1.0 + MOST_BOOKED) * usual
                mean = sum(min(us, most) for us in some) / (len(some) * usual)
                weight = 1.0 - (1.0 - PLAIN_WEIGHT) ** len(some)
                self.memory.plain_mean += weight * (mean - self.memory.plain_mean)

    @abstractmethod
    def _fade(self, n_steps: int) -> None:
        """So many steps have passed without a draft."""

    def _observe(self, record: StepRecord) -> None:
        self._n_others = record.n_others
        self._book(record)
        self._learn_drafts(record)

    @abstractmethod
    def _learn_drafts(self, record: StepRecord) -> None:
        """Take in which of its drafts held."""

    def _learn_acceptance(
        self, acceptance: AcceptanceCurve, n_asked: int, n_draft: int, n_held: int, place: int = 0
    ) -> None:
        acceptance.observe(n_asked, n_draft, n_held)
        n, n_good = self.memory.seen.get(place, (0, 0))
        self.memory.seen[place] = n + (n_draft > 0), n_good + (n_held > 0)

    def _book(self, record: StepRecord) -> None:
        """Charge what the step took. A plain step is a loss only after a draft.

        Accidents are no part of the table's times. Plain steps have some, too: a step is charged beside
        what those take with theirs.
        """
        n_others = record.n_others
        table = self.shared.table
        plain = table.step(0, n_others)
        usual = plain if record.is_plain else table.usual(record)
        if plain is None or usual is None:
            return  # no times are told
        n_steps = min(record.total_us, usual.us + MOST_BOOKED * plain.us) / plain.us
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
        """Decide the next steps' draft length. O(n_draft_max); CHOICE_US says what it takes."""
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
            far = min(math.exp(SURPRISE * math.sqrt(step.variance)), FARTHEST)
            prices.append(Price(k, cost, step.variance, far))
        return prices

    def _judge(self, acceptance: AcceptanceCurve, n_last: int) -> list[Option]:
        """All lengths, the plain step first; `n_last`: the present one. Costs are in plain steps."""
        tokens, chances, doubt = acceptance.forecast()
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
            unsure = 0.0 if self._has_shadow else doubt * (gained - 1.0)
            options.append(judged(price, gained, unsure, cost, appetite, once))
            if k < self.n_draft_max:
                ends, longer = longer - chances[k + 1], chances[k + 1]
                shorter += ends * price.cost
                alike += ends * ends
        return options

    def _set(self, choice: Choice) -> None:
        self._phase, self._n_draft = choice.phase, choice.n_draft
        self._say(choice)

    def _say(self, choice: Choice) -> None:
        """Keep it among the decisions, if it is another one than the last for its place."""
        decided = choice.n_draft, choice.phase
        if self._said.get(choice.place) != decided:
            self._said[choice.place] = decided
            step = self.n_steps + len(self._gathered) + self.n_untold
            self._decide(choice.phase, choice.n_draft, step, utilities=choice.utilities, why=choice.why)


class Forecast(ForecastBase):
    """With one length for the whole text."""

    wants_shadow = True

    def __init__(self, shared: Shared) -> None:
        """See ForecastBase."""
        self.acceptance = shared.memory(ForecastMemory).new_curve(shared.n_draft_max)
        super().__init__(shared)

    def watch_shadow(self, compare: Callable[[], None]) -> None:
        """See Controller. Drafts that hold are news, so the first choice is looked at after a step."""
        super().watch_shadow(compare)
        self._is_watched, self._keep_us = True, 0.0
        self._rest()

    def observe_shadow(self, n_draft: int, n_held: int) -> None:
        """See Controller."""
        self._has_shadow = True
        self._learn_acceptance(self.acceptance, self.n_draft_max, n_draft, n_held)

    def _learn_drafts(self, record: StepRecord) -> None:
        """See ForecastBase."""
        is_beginning = record.n_draft == 0 and not record.is_plain  # it drafts, for the next step
        if (self._n_draft > 0 or not self._has_shadow) and not is_beginning:
            self._learn_acceptance(self.acceptance, self._n_draft, record.n_draft, record.n_accepted)

    def _fade(self, n_steps: int) -> None:
        """See ForecastBase."""
        if not self._has_shadow:
            self.acceptance.fade(n_steps)

    def _choose_priced(self) -> None:
        """See ForecastBase."""
        self._set(pick(self._judge(self.acceptance, self._n_draft), self.memory.ledger))
