"""pyspac.speculation.forecast: choices worked by hand, phase changes, bounds on what is lost."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import always, play

from pyspac.engine.step import StepRecord
from pyspac.speculation.budget import CAPACITY, SHARE
from pyspac.speculation.controller import Controller, Shared
from pyspac.speculation.forecast import BASELINE_AGE_MAX, Forecast
from pyspac.speculation.manager import CONTROLLERS

STEP = 10_000.0  # of a plain step, microseconds: long enough for a look at each
FLAT = [STEP] * 9
LINEAR = [STEP * (1 + k) for k in range(9)]
MOE = [STEP * x for x in (1, 1.6, 2.1, 2.6, 3.0, 3.3, 3.6, 3.9, 4.2)]  # the union of experts
SWITCH = [STEP * x for x in (1, 2.6, 2.8, 3.0, 3.1, 3.2, 3.3, 3.4, 3.5)]  # another kernel from two tokens on


def forecast(n_draft_max: int = 8) -> Forecast:
    return Forecast(Shared(n_draft_max=n_draft_max))


def test_starts_with_four_plain_steps() -> None:
    assert play(forecast(), 5, FLAT, always(8)).n_drafts[:4] == [0, 0, 0, 0]


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
    assert played.n_drafts[200:].count(0) >= 190


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


def test_plain_steps_are_renewed() -> None:
    n_drafts = play(forecast(), 400, FLAT, always(8)).n_drafts
    plain = [i for i, n in enumerate(n_drafts) if n == 0][4:]
    assert 4 <= len(plain) <= 8, "two each time: the first one is a switch of widths"
    assert all(b - a == 1 or b - a >= BASELINE_AGE_MAX for a, b in pairwise(plain))


def test_drafter_with_nothing_to_say_costs_nothing() -> None:
    """Asked but silent: plain steps, no loss, the budget stays full."""
    c = forecast()
    for _ in range(100):
        c.next_n_draft()
        c.observe(StepRecord(n_draft=0, n_accepted=0, verify_us=STEP))
    assert c.shared.budget.level == pytest.approx(CAPACITY)


class TestShadow:
    """Acceptance is known without verifying."""

    def test_never_tries_what_the_shadow_denies(self) -> None:
        c = forecast()
        n_drafts = []
        for _ in range(200):
            n_drafts.append(c.next_n_draft())
            if n_drafts[-1] == 0:
                c.observe_shadow(8, 0)
            c.observe(StepRecord(n_draft=n_drafts[-1], n_accepted=0, verify_us=MOE[n_drafts[-1]]))
        assert n_drafts[20:].count(0) == 180, "no probes"

    def test_sees_drafts_that_begin_to_hold(self) -> None:
        c = forecast()
        for held in [0] * 100 + [8] * 60:
            n = c.next_n_draft()
            if n == 0:
                c.observe_shadow(8, held)
            c.observe(StepRecord(n_draft=n, n_accepted=min(n, held), verify_us=MOE[n]))
        assert c.next_n_draft() == 8


def test_other_sequences_in_the_batch() -> None:
    """Three other tokens in each batch: costs are those of widths 4 and up, measured there."""
    c = forecast()
    for _ in range(150):
        n = c.next_n_draft()
        verify_us = STEP * (1 + 0.2 * (3 + n))
        c.observe(StepRecord(n_draft=n, n_accepted=min(n, 1), n_tokens=4 + n, verify_us=verify_us))
    assert c.next_n_draft() in (1, 2), "2 is nearly as good, and shows whether the second token holds"


def test_explains_itself() -> None:
    c = forecast()
    play(c, 200, MOE, always(0))
    phases = {d.phase for d in c.decisions}
    assert {"baseline", "test", "probe", "choose"} <= phases
    assert all(d.why for d in c.decisions)


CURVES = st.lists(st.floats(0.0, 1.0), min_size=8, max_size=8)
COSTS = st.lists(st.floats(1.0, 1.9), min_size=8, max_size=8)


@pytest.mark.parametrize("step_us", [STEP, 500.0], ids=["long steps", "short steps"])
@settings(max_examples=60, deadline=None)
@given(curve=CURVES, factors=COSTS, data=st.randoms(use_true_random=False))
def test_loss_is_bounded_whatever_happens(
    step_us: float, curve: list[float], factors: list[float], data: object
) -> None:
    """Any acceptance, any rising costs up to 10: at most SHARE, the bucket and its last overdraft.

    Short steps pass by in groups, which may lose a little more before they are looked at.
    """
    costs = [step_us]
    for factor in factors:
        costs.append(min(10 * step_us, costs[-1] * factor))

    def accepts(step: int, n_draft: int) -> int:
        n = 0
        while n < n_draft and data.random() < curve[n]:  # type: ignore[attr-defined]
            n += 1
        return n

    played = play(forecast(), 400, costs, accepts)
    overdraft = (2 if step_us == STEP else 4) * costs[-1] / step_us
    n_plain = played.n_tokens  # steps that plain decoding would take
    assert played.total_us / step_us <= n_plain * (1 + SHARE) / (1 - SHARE) + CAPACITY + overdraft


def test_short_steps_are_looked_at_now_and_then() -> None:
    """At 500 us each a look would be felt; but a loss is noticed within a few steps."""
    costs = [cost / 20 for cost in MOE]
    c = forecast()
    play(c, 200, costs, always(8))
    n_listened = 0
    for _ in range(160):
        n_listened += c.is_listening()
        play(c, 1, costs, always(8))
    assert 10 <= n_listened <= 40
    assert play(c, 40, costs, always(0)).n_drafts[12:].count(0) >= 24


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
