"""pyspac.speculation.forecast: choices worked by hand, phase changes, bounds on what is lost."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import always, play

from pyspac.engine.step import StepRecord
from pyspac.ledger import CAPACITY, SHARE, LossLedger
from pyspac.speculation.choice import Choice, Option, Price, judged, pick
from pyspac.speculation.controller import Controller, Shared
from pyspac.speculation.forecast import Forecast
from pyspac.speculation.manager import CONTROLLERS

STEP = 10_000.0  # of a plain step, microseconds
FLAT = [STEP] * 9
LINEAR = [STEP * (1 + k) for k in range(9)]
MOE = [STEP * x for x in (1, 1.6, 2.1, 2.6, 3.0, 3.3, 3.6, 3.9, 4.2)]  # the union of experts
SWITCH = [STEP * x for x in (1, 2.6, 2.8, 3.0, 3.1, 3.2, 3.3, 3.4, 3.5)]  # another kernel from two tokens on


def forecast(n_draft_max: int = 8) -> Forecast:
    return Forecast(Shared(n_draft_max=n_draft_max))


def test_starts_with_plain_steps() -> None:
    """One after the prompt, which is none to measure, and two that are."""
    assert play(forecast(), 4, FLAT, always(8)).n_drafts[:3] == [0, 0, 0]


def test_first_step_after_a_prompt_is_not_believed() -> None:
    """It takes twice as long, as caches are cold. Drafts, of which half a token holds, would seem to pay."""
    c, costs = forecast(), [STEP, *[1.8 * STEP] * 8]
    c.observe(StepRecord(verify_us=2 * STEP))
    assert play(c, 200, costs, lambda step, n: min(n, step % 2)).n_drafts[20:].count(0) >= 150


def test_change_of_widths_is_counted() -> None:
    """An n-gram drafter has one good token every other step. It would pay but for the graphs: each step has
    another width than the one before, which takes as long as a plain step."""
    c, n_drafts, width = forecast(), [], 1
    for step in range(300):
        n = min(1, c.next_n_draft()) if step % 2 else 0
        us = STEP * (1.1 if n else 1.0) + STEP * (1 + n != width)
        c.observe(StepRecord(n_draft=n, n_accepted=n, verify_us=us))
        width = 1 + n
        n_drafts.append(n)
    assert sum(n_drafts[100:]) <= 20


def settled() -> Forecast:
    """One whose drafts never hold, and that has chosen plain steps for a while."""
    c = forecast()
    play(c, 200, MOE, always(0))
    assert c.next_n_draft() == 0
    return c


def test_steps_told_of_together_are_one_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler hears of several at once; all are learned from, and asking again chooses nothing anew."""
    c = settled()
    n_choices, choose, n_steps = 0, c._choose, c.n_steps

    def counted() -> None:
        nonlocal n_choices
        n_choices += 1
        choose()

    monkeypatch.setattr(c, "_choose", counted)
    for _ in range(40):
        c.observe(StepRecord(verify_us=STEP))
    assert c.n_steps == n_steps + 40
    assert c.next_n_draft() == c.next_n_draft()
    assert n_choices == 1


def test_lengths_in_turns_are_chosen_anew() -> None:
    """Each step is the first of its length: the second one since the choice is judged by all the same."""
    c = settled()
    for n in (1, 2):
        c.observe(StepRecord(n_draft=n, verify_us=MOE[n]))
    assert c._is_due


def test_drafts_that_hold_are_learned_from_while_nothing_is_drafted() -> None:
    """A server's limit takes effect a step later."""
    c = settled()
    before, n_before = c.acceptance.forecast().tokens[2], c.memory.n_drafts
    for _ in range(2):
        c.observe(StepRecord(n_draft=2, n_accepted=2, verify_us=MOE[2]))
    assert c.acceptance.forecast().tokens[2] > before
    assert c.memory.n_drafts == n_before + 2


def test_a_drafter_that_finds_nothing_is_thought_to_find_nothing() -> None:
    """Its steps are plain, but drafts were asked for."""
    c = settled()
    c._n_draft = 4
    for _ in range(30):
        c.observe(StepRecord(verify_us=STEP))
    assert c.acceptance.forecast().chances[1] < 0.5


def test_the_plain_step_behind_a_draft_is_charged() -> None:
    """A change of widths is what drafts cost."""
    c = settled()
    c.last = StepRecord(n_draft=2, verify_us=MOE[2])
    c.memory.ledger.level = 3.0
    c.observe(StepRecord(verify_us=5 * STEP))
    assert c.memory.ledger.level < 0.5


def test_what_plain_steps_take_beside_their_usual_time_are_accidents() -> None:
    """Not what they scatter by; and of an accident no more than is booked."""
    c = settled()
    c.memory.plain_mean = 1.0
    for i in range(80):
        c.observe(StepRecord(verify_us=STEP * (1 + 0.1 * (i % 2))))
    assert c.memory.plain_mean <= 1.03
    c.observe(StepRecord(verify_us=1e9))
    assert 1.0 < c.memory.plain_mean < 1.15


def test_steps_of_no_time_are_taken_in() -> None:
    """A clock stood still."""
    c = settled()
    for _ in range(20):
        c.observe(StepRecord())
    assert c.next_n_draft() == 0


def test_new_length_is_judged_by_its_second_step() -> None:
    """The first takes three times as long: a graph, cold caches, a drafter that reads what it missed."""
    c, last, n_firsts, n_drafts = forecast(), 0, 0, []
    for _ in range(60):
        n = c.next_n_draft()
        us = STEP * (1.0 if n == 0 else 1.3) * (3.0 if n != last and n else 1.0)
        n_firsts += n != last
        c.observe(StepRecord(n_draft=n, n_accepted=n, verify_us=us))
        last = n
        n_drafts.append(n)
    assert min(n_drafts[8:]) > 0
    assert n_firsts <= 8


def test_backlog_is_no_small_thing() -> None:
    """A draft model that has missed 60 tokens reads them for ten steps. Not counted, that would lose 15 %."""
    c, n_missed, n_returns = forecast(), 0, 0
    costs = [STEP, 1.7 * STEP, *[4.0 * STEP] * 7]
    total_us, n_tokens = 0.0, 0
    for step in range(600):
        n = c.next_n_draft()
        n_accepted = min(n, step % 8 > 2)
        draft_us = 100.0 * n + STEP / 6 * n_missed * (n > 0)
        c.observe(StepRecord(n_draft=n, n_accepted=n_accepted, draft_us=draft_us, verify_us=costs[n]))
        n_returns += n > 0 and n_missed > 0
        n_missed = 0 if n else n_missed + 1
        total_us += draft_us + costs[n]
        n_tokens += 1 + n_accepted
    assert n_returns <= 8
    assert total_us / n_tokens <= STEP * (1 + SHARE + CAPACITY / 600 + 0.01)


def test_second_request_knows_the_costs() -> None:
    shared = Shared(n_draft_max=8)
    play(Forecast(shared), 90, FLAT, always(8))
    assert play(Forecast(shared), 4, FLAT, always(8)).n_drafts == [8, 8, 8, 8]


@pytest.mark.parametrize("costs", [FLAT, MOE, SWITCH])
def test_everything_holds(costs: list[float]) -> None:
    """K = 8 is best: 9 tokens for at most 4.2 plain steps. Hill climbing from K = 1 would not pass SWITCH."""
    played = play(forecast(), 200, costs, always(8))
    assert played.n_drafts[100:].count(8) >= 97  # but for a plain step now and then


@pytest.mark.parametrize("costs", [LINEAR, MOE, SWITCH])
def test_nothing_holds(costs: list[float]) -> None:
    played = play(forecast(), 400, costs, always(0))
    assert played.total_us / played.n_tokens <= STEP * (1 + SHARE + CAPACITY / 400 + 0.01)
    assert played.n_drafts[200:].count(0) >= 185, "what the ledger earns is tried"


def test_two_hold() -> None:
    """Utilities at MOE's costs: K = 1: 2 / 1.6 = 1.25, K = 2: 3 / 2.1 = 1.43, K = 3: 3 / 2.6 = 1.15."""
    played = play(forecast(), 200, MOE, always(2))
    assert played.n_drafts[150:].count(2) >= 42


def test_drafts_begin_to_hold() -> None:
    """Off while nothing holds; a probe notices, and within 80 steps speculation is on."""
    c = forecast()
    play(c, 200, MOE, always(0))
    played = play(c, 150, MOE, always(8))
    assert played.n_drafts[80:].count(8) >= 60


def test_drafts_cease_to_hold() -> None:
    c = forecast()
    play(c, 200, MOE, always(8))
    played = play(c, 200, MOE, always(0))
    assert played.total_us <= 200 * STEP * (1 + SHARE) + (CAPACITY + 2 * 3.2) * STEP
    assert played.n_drafts[60:].count(0) >= 130


def test_costs_rise() -> None:
    """Verification becomes dear (the cache went cold, say): three drafts hold, K = 3 no longer pays."""
    c = forecast()
    assert play(c, 190, FLAT, always(3)).n_drafts[-1] >= 3
    played = play(c, 200, [STEP * (1 + 1.5 * k) for k in range(9)], always(3))
    assert played.n_drafts[100:].count(0) >= 90


def test_plain_step_is_measured_again_before_it_is_forgotten() -> None:
    """Drafting pays a little: whether it still does hangs on a time that was not seen for long."""
    costs = [STEP, *[1.6 * STEP] * 8]
    n_drafts = play(forecast(), 1000, costs, always(1)).n_drafts
    plain = [i for i, n in enumerate(n_drafts) if n == 0]
    assert 4 <= len([i for i in plain if i > 100]) <= 60
    assert max(plain) > 500


def test_widths_that_were_not_seen_for_a_thousand_million_passes() -> None:
    """A busy server of 64 slots takes days for that; then it is alone with one request again."""
    c = forecast()
    play(c, 200, MOE, always(8))
    c.shared.table.passes.n_observed += 1_000_000_000
    assert play(c, 200, MOE, always(8)).n_drafts[100:].count(8) >= 50


def test_drafter_with_nothing_to_say_costs_nothing() -> None:
    """Asked but silent: plain steps, no loss, the ledger stays full."""
    c = forecast()
    for _ in range(100):
        c.next_n_draft()
        c.observe(StepRecord(n_draft=0, n_accepted=0, verify_us=STEP))
    assert c.memory.ledger.level == pytest.approx(CAPACITY)


def play_with_accidents(times: float, is_for_all: bool) -> tuple[list[int], float]:
    """Every tenth pass, of wide ones or of all, takes so many times as long; all drafts of two hold and gain.

    Returns the lengths, and the time in plain steps per token.
    """
    c, rng, costs = forecast(2), random.Random(0), [STEP, 1.3 * STEP, 1.5 * STEP]
    n_drafts, us, n_tokens = [], 0.0, 0
    for _ in range(3000):
        n = c.next_n_draft()
        is_accident = rng.random() < 0.1 and (n > 0 or is_for_all)
        step_us = costs[n] * (times if is_accident else 1)
        c.observe(StepRecord(n_draft=n, n_accepted=n, verify_us=step_us))
        n_drafts.append(n)
        us, n_tokens = us + step_us, n_tokens + 1 + n
    return n_drafts, us / n_tokens / STEP


def test_accidents_of_wide_passes_are_charged() -> None:
    """Three tokens would take 1.5 steps, were it not for them: with them they take 4.35."""
    _, us = play_with_accidents(20.0, is_for_all=False)
    assert us <= 1.15


def test_accidents_of_all_passes_are_nobodys_fault() -> None:
    """Once what plain steps take with theirs is known, which few plain steps tell."""
    n_drafts, _ = play_with_accidents(10.0, is_for_all=True)
    assert n_drafts[1500:].count(2) >= 1400


def test_other_sequences_in_the_batch() -> None:
    """Three other tokens in each batch: costs are those of widths 4 and up, measured there; they wait too."""
    c = forecast()
    for _ in range(150):
        n = c.next_n_draft()
        verify_us = STEP * (1 + 0.1 * n)
        c.observe(StepRecord(n_draft=n, n_accepted=min(n, 1), n_tokens=4 + n, verify_us=verify_us))
    assert c.next_n_draft() in (1, 2), "2 is nearly as good, and shows whether the second token holds"


def test_three_sequences_gain_together_or_not_at_all() -> None:
    """Each would be faster alone with drafts, at the others' cost: a draft that holds half of the time gains
    half a token of three for a pass of 1.2 the time. Together they would lose."""
    shared = Shared(n_draft_max=1)
    controllers = [Forecast(shared) for _ in range(3)]
    n_tokens, total_us = 0, 0.0
    for step in range(400):
        n_drafts = [c.next_n_draft() for c in controllers]
        width = 3 + sum(n_drafts)
        us = STEP * (1 + 0.3 * (width - 3))
        for i, (c, n) in enumerate(zip(controllers, n_drafts, strict=True)):
            n_accepted = min(n, (step + i) % 2)
            c.observe(
                StepRecord(server_slot=i, n_draft=n, n_accepted=n_accepted, n_tokens=width, verify_us=us)
            )
            n_tokens += 1 + n_accepted
        total_us += us
    assert n_tokens / total_us >= 0.95 * 3 / STEP


def test_new_requests_start_from_what_others_saw() -> None:
    """Drafts held for nobody so far: the next request begins without."""
    shared = Shared(n_draft_max=8)
    play(Forecast(shared), 200, MOE, always(0))
    assert first_utility(shared) < forecast_utility_of_a_first_request()


def forecast_utility_of_a_first_request() -> float:
    """At the same costs."""
    shared = Shared(n_draft_max=8)
    play(Forecast(shared), 200, MOE, always(8))
    return first_utility(shared)


def first_utility(shared: Shared) -> float:
    """Of one drafted token, to a new request."""
    c = Forecast(shared)
    c.next_n_draft()
    return c.decisions[-1].utilities[1]


def test_explains_itself() -> None:
    c = forecast()
    play(c, 200, MOE, always(0))
    phases = {d.phase for d in c.decisions}
    assert {"baseline", "probe", "choose"} <= phases
    assert all(d.why for d in c.decisions)


def test_says_which_better_length_the_ledger_does_not_allow() -> None:
    """K = 7 and K = 8 have higher utilities, and may lose two plain steps a step: the better one is named."""
    c = forecast()
    options = [Option(0, 1.0, 0.0, 0.0), Option(5, 1.6, 0.5, -0.1), Option(7, 1.65, 0.55, 2.0)]
    options.append(Option(8, 1.7, 0.6, 2.0))
    assert said(pick(options, c.memory.ledger)) == (8, "choose", "the best forecast")
    c.memory.ledger.level = 1.0
    why = "the best forecast that the loss ledger allows: without it K = 8"
    assert said(pick(options, c.memory.ledger)) == (5, "choose", why)


def test_a_length_as_good_that_is_not_allowed_is_not_named() -> None:
    options = [Option(0, 1.0, 0.0, 0.0), Option(5, 1.6, 0.5, 9.0), Option(8, 1.6, 0.5, -0.1)]
    assert said(pick(options, LossLedger())) == (8, "choose", "the best forecast")


def test_the_plain_step_is_measured_where_it_may_be_better() -> None:
    options = [Option(0, 1.0, 0.3, 0.0), Option(2, 1.1, 0.2, 0.1)]
    assert said(pick(options, LossLedger())) == (0, "baseline", "the plain step's time is not sure")


def test_what_an_option_may_lose_by_hand() -> None:
    """A step of two plain ones that may take half as long again, and gains 1.5, give or take a fifth."""
    option = judged(Price(2, 2.0, 0.04, 1.5), 1.5, 0.3, 2.0, appetite=0.5, once=0.25)
    score = math.log(0.75) + 0.5 * math.sqrt(0.08)
    assert option == (2, 0.75, pytest.approx(score), pytest.approx(1.8), 0.25)


def said(choice: Choice) -> tuple[int, str, str]:
    return choice.n_draft, choice.phase, choice.why


CURVES = st.lists(st.floats(0.0, 1.0), min_size=8, max_size=8)
COSTS = st.lists(st.floats(1.0, 1.9), min_size=8, max_size=8)


@settings(max_examples=60, deadline=None)
@given(curve=CURVES, factors=COSTS, data=st.randoms(use_true_random=False))
def test_loss_is_bounded_whatever_happens(curve: list[float], factors: list[float], data: object) -> None:
    """Any acceptance, any rising costs up to 10: at most SHARE, a full ledger, and what may be overdrawn."""
    costs = [STEP]
    for factor in factors:
        costs.append(min(10 * STEP, costs[-1] * factor))

    def accepts(step: int, n_draft: int) -> int:
        n = 0
        while n < n_draft and data.random() < curve[n]:  # type: ignore[attr-defined]
            n += 1
        return n

    played = play(forecast(), 400, costs, accepts)
    overdraft = CAPACITY + 2 * costs[-1] / STEP  # by what seemed sure, and by the last step
    n_plain = played.n_tokens  # steps that plain decoding would take
    assert played.total_us / STEP <= n_plain * (1 + SHARE) / (1 - SHARE) + CAPACITY + overdraft


@pytest.mark.parametrize("name", CONTROLLERS)
@settings(max_examples=25, deadline=None)
@given(records=st.lists(st.tuples(st.integers(0, 8), st.floats(0, 1e6)), min_size=1, max_size=300))
def test_every_controller_stays_in_range(name: str, records: list[tuple[int, float]]) -> None:
    """Drafts shorter than asked for, times of zero, anything."""
    c: Controller = CONTROLLERS[name](Shared(n_draft_max=5))
    for n_accepted, us in records:
        limit = c.next_n_draft()
        assert 0 <= limit <= 5
        n_draft = min(limit, n_accepted)
        c.observe(StepRecord(n_draft=n_draft, n_accepted=n_draft // 2, verify_us=us))
