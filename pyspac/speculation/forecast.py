"""Our controller: forecast tokens per second of every draft length, from two curves, and take the best.

Expected tokens come from the acceptance curve (`acceptance.py`), times from the cost table
(`cost_table.py`): both are learned from every step, so a draft length need not be tried to be judged, and a
jump of T(n) is no hill to climb. What the forecast cannot know it buys, out of the loss budget
(`budget.py`), which also bounds what a wrong forecast can lose. With a drafter that costs nothing (n-gram)
acceptance is watched in the shadow while speculation is off: drafts are compared with the text that follows,
so that trying out is never needed. Where drafters end drafts by themselves is learned as well. The knob is
the budget's share of time.

Utility of K = E[tokens | K] / (E[cost(n)] + P(n changes) * switch), where n <= K is where the drafter ends a
draft by itself, and switch what a change of widths costs.
"""

from __future__ import annotations

from typing import Final

from pyspac.engine.step import StepRecord
from pyspac.speculation.acceptance import AcceptanceCurve
from pyspac.speculation.controller import Controller, Phase, Shared
from pyspac.speculation.prices import N_COST_SAMPLES, Prices

LADDER: Final = (1, 2, 3, 5, 8, 12, 15)
N_BASELINE_STEPS: Final = 4
N_RENEWAL_STEPS: Final = 2  # in a row when it is measured again: the first one pays for the change of widths
N_TRIES: Final = 4  # per draft length and request, to measure its width
N_IDLE_STEPS: Final = 3  # that a choice of 0 is kept at first; up to the next while nothing happens
N_IDLE_STEPS_MAX: Final = 12
LOOK_US: Final = 120.0  # of a look, with cold caches
LOOK_SHARE: Final = 0.004  # of the time, that looks may take
N_LOOK_STEPS_MAX: Final = 12  # steps from one look to the next
LOOK_SOON: Final = 0.25  # of them, after a change of mind
UNSEEN_LOSS: Final = 1.0  # steps' time that may be lost before the next look is taken at once
N_PRICE_STEPS: Final = 2  # looks for which costs are kept
BASELINE_AGE_MAX: Final = 96  # steps until a plain one is run for the cost table
DOUBT: Final = 0.35  # |log|; if all times seem to have moved by more, a plain step must confirm it
CLEAR: Final = 1.5  # utility from which no such doubt can change the choice
OFF_UTILITY: Final = 0.9  # to go on with them: coming back takes reading what was missed
ON_UTILITY: Final = 1.08  # to begin with drafts; estimates scatter, and the best of many flatters
N_CHANGE_STEPS: Final = 16  # in which it must earn what it costs to change widths
PROBE_DISTANCE: Final = 8  # steps between probes at first; doubles while they fail
PROBE_DISTANCE_MAX: Final = 64
RISK_SHARE: Final = 0.5  # of the expected gain that counts against what a step may lose
OUTLIER: Final = 1.5  # times the usual time; what a step takes beyond that is an accident
PLAIN_GAIN: Final = 0.1  # of the mean plain step
MEMORY_GAIN: Final = 0.005  # of the long-run acceptance, per draft


class Forecast(Controller):
    """One request's choices; costs, budget and long-run acceptance are shared with all others."""

    name = "forecast"
    wants_shadow = True

    def __init__(self, shared: Shared) -> None:
        """Plain steps first, if the plain step's time is not known yet."""
        super().__init__(shared)
        self.acceptance = AcceptanceCurve(shared.n_draft_max, shared.acceptance)
        self.lengths = [k for k in LADDER if k < shared.n_draft_max] + [shared.n_draft_max]
        self.utilities: dict[int, float] = {0: 1.0}
        self._has_shadow = False
        self._n_tries = dict.fromkeys(self.lengths, 0)  # surveys; a drafter may have shorter drafts only
        self._n_others = 0
        self._probe_distance = PROBE_DISTANCE
        self._next_probe = 0  # step
        self._was_drafting = False
        self._n_missed = 0  # plain steps that the drafter has not read
        self._last_plain = 0  # step
        self._catch_up = 0.0  # plain steps that reading them took the last time: one batch, however many
        self._chances: list[float] = []  # of drafts at least so long; this and the next two by _choose
        self._tokens: list[float] = []  # expected
        self._shorter: list[tuple[float, float]] = []  # see _price_shorter
        self._prices = Prices(shared.table, self.lengths)
        self._n_price_steps = 0  # left until prices are renewed
        self._usual: dict[tuple[int, int], float | None] = {}  # see _usual_us
        self._unseen: list[StepRecord] = []  # since the last look
        self._unseen_us = 0.0  # that they took more than plain steps for their tokens
        self._n_look_steps = 1  # from one look to the next; doubles while the choice stays
        self._n_idle = 0  # plain steps without a look so far
        self._n_idle_max = N_IDLE_STEPS
        self._n_draft = 0
        self._phase: Phase = "choose"
        self._choose()

    def next_n_draft(self) -> int:
        return self._n_draft

    # ------------------------------------------------------------------------------------ observing

    def is_listening(self) -> bool:
        """See Controller: in some of the steps, where those are short."""
        return not self._may_idle() and len(self._unseen) + 1 >= self._n_look_steps

    def observe(self, record: StepRecord) -> None:
        """Take in a step. About 1 us where nothing is looked at, else some 50 us, 100 with cold caches."""
        if not self.is_listening() and self._is_usual(record):
            self._pass_by(record)
            self.n_steps += 1
            return
        unseen, self._unseen, self._unseen_us = self._unseen, [], 0.0
        for other in unseen:
            self._pay(other, None)
            self._observe(other)
        self._take(record)
        self._observe(record)
        self.n_steps += 1
        self._choose()
        self._n_look_steps = self._next_look(_n_look_steps_max(record))

    def _next_look(self, n_steps_max: int) -> int:
        """Steps until the next look: twice as many as before while the choice stays."""
        if self._phase not in ("choose", "hold"):
            return 1
        is_new = self.decisions[-1].step == self.n_steps
        return max(1, int(LOOK_SOON * n_steps_max)) if is_new else min(2 * self._n_look_steps, n_steps_max)

    def _is_usual(self, record: StepRecord) -> bool:
        """Whether the step did what was decided, in the company of the last ones."""
        return record.n_draft <= self._n_draft and record.n_others == self._n_others

    def _pass_by(self, record: StepRecord) -> None:
        """A step that nobody looks at."""
        if self._may_idle():
            self._n_idle += 1
            self._pay_plain()
        else:
            self._unseen.append(record)
            self._unseen_us += record.total_us - record.n_emitted * self.shared.plain_us
            if self._unseen_us > UNSEEN_LOSS * record.total_us:  # more than one draft in vain
                self._n_look_steps = 1
        self.shared.table.pass_by(record.width)

    def _may_idle(self) -> bool:
        """Whether a plain step may pass without a look."""
        is_off = self._n_draft == 0 and self._phase in ("choose", "hold")
        return is_off and self._n_idle < self._n_idle_max

    def _take(self, record: StepRecord) -> None:
        """Costs; drafting times after a pause hold the drafter's catching up and do not count."""
        table = self.shared.table
        is_new = table.verify.n_samples(record.width) < N_COST_SAMPLES
        expected = table.step_us(record.n_draft, record.n_others) if is_new else None
        table.observe(record, is_draft_typical=self._was_drafting or table.draft.n_observed == 0)
        self._pay(record, expected)

    def _observe(self, record: StepRecord) -> None:
        self._n_others = record.n_others
        if self._n_draft > 0 or not self._has_shadow:
            self._learn(record.n_draft, record.n_accepted, n_asked=self._n_draft)
        if self._phase == "test" and record.n_draft:
            self._n_tries[self._n_draft] += 1
        if self._phase == "probe" and record.n_draft:
            self._end_probe(is_success=record.n_accepted == record.n_draft)

    def observe_shadow(self, n_draft: int, n_held: int) -> None:
        """See Controller."""
        self._has_shadow = True
        if n_held:
            self._n_idle_max = N_IDLE_STEPS  # something happens: look sooner
        self._learn(n_draft, n_held, n_asked=self.n_draft_max)

    def _learn(self, n_draft: int, n_held: int, *, n_asked: int) -> None:
        if n_draft:
            self.acceptance.observe(n_draft, n_held)
            old = self.acceptance.prior if self.shared.acceptance is None else self.shared.acceptance
            self.shared.acceptance = old + MEMORY_GAIN * ((n_held > 0) - old)
        else:
            self.acceptance.forget(1 + self._n_idle, self.shared.acceptance)
        self.acceptance.observe_length(n_asked, n_draft)

    def _pay(self, record: StepRecord, expected: float | None) -> None:
        """Book what the step gained or lost against the mean plain step.

        It is charged what it took, up to OUTLIER times the usual time, or what was `expected` of a new width:
        the rest is an accident, and not speculation's fault.
        """
        shared, n_others = self.shared, record.n_others
        if record.n_draft == 0:
            self._learn_plain(record)
            return self._pay_plain()
        self._was_drafting = True
        if self._n_missed:
            self._pay_catch_up(record)
        usual = expected or self._usual_us(record.n_draft, n_others)
        base = shared.plain_us if n_others == 0 else shared.table.step_us(0, n_others)
        if not usual or not base:
            return None
        return shared.budget.pay(min(record.total_us, OUTLIER * usual), record.n_emitted, base)

    def _pay_plain(self) -> None:
        """Book a plain step: the first one after drafts changes widths, which is theirs to pay."""
        self._n_missed += 1
        self._last_plain = self.n_steps
        self.shared.budget.pay(1.0 + self._was_drafting * self._prices.switch, 1, 1.0)
        self._was_drafting = False

    def _usual_us(self, n_draft: int, n_others: int) -> float | None:
        """The table's time of a step, as it was when prices were renewed."""
        key = n_draft, n_others
        if key not in self._usual:
            self._usual[key] = self.shared.table.step_us(n_draft, n_others)
        return self._usual[key]

    def _learn_plain(self, record: StepRecord) -> None:
        """The mean plain step, for the budget; the table's is the shortest of three."""
        if record.n_others == 0 and (usual := self._usual_us(0, 0)):
            us = min(record.total_us, OUTLIER * usual)
            old = self.shared.plain_us or us
            self.shared.plain_us = old + PLAIN_GAIN * (us - old)

    def _pay_catch_up(self, record: StepRecord) -> None:
        """Book what the drafter took to read the tokens it missed."""
        base, typical = self.shared.table.step_us(0), self.shared.table.draft.us(record.n_draft)
        if base and typical is not None:
            extra = max(0.0, record.draft_us - typical) / base
            self.shared.budget.pay(extra, 0, 1.0)
            self._catch_up = extra
        self._n_missed = 0

    def _end_probe(self, *, is_success: bool) -> None:
        """A success earns another probe at once, a failure waits twice as long."""
        if is_success:
            self._probe_distance, self._next_probe = PROBE_DISTANCE, self.n_steps
        else:
            self._next_probe = self.n_steps + self._probe_distance
            self._probe_distance = min(2 * self._probe_distance, PROBE_DISTANCE_MAX)

    # ------------------------------------------------------------------------------------- choosing

    def _choose(self) -> None:
        """Decide the next step's draft length. O(number of lengths)."""
        self._n_idle = 0
        if self.n_draft_max == 0:
            return self._set("choose", 0, "the cap is 0")
        if self._needs_baseline():
            return self._set("baseline", 0, "the plain step's time")
        self._chances = self.acceptance.chances()
        self._tokens = self.acceptance.expected_tokens(self._chances)
        self._renew_prices()
        self._price_shorter()
        self.utilities = {0: 1.0} | {k: self._utility(k, self._prices.cost[k]) for k in self.lengths}
        if (survey := self._survey()) is not None:
            return self._set("test", survey, "its time is not known, and it may be the best")
        best = self._best()
        if best > 0:
            self._probe_distance, self._next_probe = PROBE_DISTANCE, self.n_steps + PROBE_DISTANCE
            return self._set("choose", best, "the best forecast")
        if max(self.utilities.values()) > ON_UTILITY:
            return self._set("hold", 0, "the loss budget does not allow a length that may pay")
        return self._choose_off()

    def _choose_off(self) -> None:
        """Speculation does not pay; look now and then whether it would again."""
        is_due = self.n_steps >= self._next_probe and not self._has_shadow
        loss = self._prices.cost[self.lengths[0]] - 1.0 + self._catch_up + 2.0 * self._prices.switch
        if is_due and self.shared.budget.can_lose(loss):
            return self._set("probe", self.lengths[0], "whether drafts hold again")
        was_off = self._phase == "choose" and self._n_draft == 0
        self._n_idle_max = min(2 * self._n_idle_max, N_IDLE_STEPS_MAX) if was_off else N_IDLE_STEPS
        if not self._has_shadow:  # plain steps say nothing about drafts
            self._n_idle_max = max(self._n_idle_max, min(self._next_probe - self.n_steps, PROBE_DISTANCE_MAX))
        k = max(self.lengths, key=lambda k: self.utilities[k])
        return self._set("choose", 0, f"no forecast reaches 1 (best: K = {k})")

    def _needs_baseline(self) -> bool:
        """Whether the plain step's time is unknown, old, or in doubt; other sequences hide it."""
        if self._n_others:
            return False
        curve = self.shared.table.verify
        age = curve.age(1)
        if age is None or curve.n_samples(1) < N_BASELINE_STEPS:
            return True
        if self._phase == "baseline" and self._n_missed < N_RENEWAL_STEPS:
            return True
        is_old = max(age, self.n_steps - self._last_plain) >= BASELINE_AGE_MAX
        is_clear = max(self.utilities.values()) > CLEAR
        return is_old or (curve.drift(1) > DOUBT and not is_clear)

    def _renew_prices(self) -> None:
        """Every few steps, and after each that measured something new."""
        self._n_price_steps -= 1
        if self._n_price_steps < 0 or self._phase != "choose":
            self._prices.renew(self._n_others)
            self._usual.clear()
            self._n_price_steps = N_PRICE_STEPS

    def _best(self) -> int:
        """The best length that the budget allows: after losses only small stakes."""
        least = OFF_UTILITY if self._n_draft else ON_UTILITY
        allowed = [k for k in self.lengths if self.utilities[k] > least and self._can_risk(k)]
        best = max(allowed, key=lambda k: self.utilities[k], default=0)
        is_kept = self._phase == "choose" and (self._n_draft == 0 or self._n_draft in allowed)
        margin = 1.0 + self._prices.switch / N_CHANGE_STEPS
        if is_kept and self.utilities[best] < margin * self.utilities[self._n_draft]:
            return self._n_draft
        return best

    def _can_risk(self, k: int) -> bool:
        """Whether a step at this length may fail; half of what it should gain counts."""
        if 0 < k <= self._n_draft:
            return self.shared.budget.can_lose(0.0)  # what it took to begin is lost already
        risk = self._prices.cost[k] - 1.0 - RISK_SHARE * (self._tokens[k] - 1.0)
        return self.shared.budget.can_lose(max(0.0, risk))

    def _survey(self) -> int | None:
        """A length whose time is not known well, if it were the best should it cost as little as it may."""
        best, prices = max(ON_UTILITY, max(self.utilities.values())), self._prices
        for k in prices.unsure:
            could_win = self._n_tries[k] < N_TRIES and self._utility(k, prices.least[k]) > best
            if could_win and self._can_risk(k):
                return k
        return None

    def _price_shorter(self) -> None:
        """For each length: the cost of drafts that end before it, times their chances, and the chance that
        two of them in a row end alike."""
        self._shorter, cost, alike = [], 0.0, 0.0
        chances = [*self._chances, 0.0]
        for k, price in enumerate(self._prices.by_length):
            self._shorter.append((cost, alike))
            if (ends := chances[k] - chances[k + 1]) > 0.0:
                cost += ends * price
                alike += ends * ends

    def _utility(self, k: int, cost: float) -> float:
        chance, (shorter_cost, shorter_alike) = self._chances[k], self._shorter[k]
        changes = 1.0 - shorter_alike - chance * chance
        return self._tokens[k] / (shorter_cost + chance * cost + changes * self._prices.switch)

    def _set(self, phase: Phase, n_draft: int, why: str) -> None:
        if (phase, n_draft) != (self._phase, self._n_draft) or not self.decisions:
            self._decide(phase, n_draft, utilities=dict(self.utilities), why=why)
        self._phase, self._n_draft = phase, n_draft


def _n_look_steps_max(record: StepRecord) -> int:
    """Steps from one look to the next: one, unless steps are so short that a look is felt."""
    wanted = LOOK_US / (LOOK_SHARE * max(record.total_us, 1.0))
    return max(1, min(N_LOOK_STEPS_MAX, int(wanted)))
