"""pyspac.speculation: what a match is worth, by how long it is; choices by place in the text."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspac.engine.step import StepRecord
from pyspac.ledger import CAPACITY, SHARE
from pyspac.speculation.choice import Price
from pyspac.speculation.controller import Shared
from pyspac.speculation.match_forecast import MatchForecast
from pyspac.speculation.matches import N_GUESSED, N_MATCHED_MAX, MatchCurve

STEP = 10_000.0  # of a plain step, microseconds
MOE = [STEP * x for x in (1, 1.6, 2.1, 2.6, 3.0, 3.3, 3.6, 3.9, 4.2)]  # the union of experts
DEAR = [STEP * (1 + 0.97 * k) for k in range(9)]

# ---- the curve ------------------------------------------------------------------------------------


def test_first_guess() -> None:
    """The n-th part of all matches is longer than n: of those of 4, 3/4 come to 5 tokens and 3/5 to 6."""
    curve = MatchCurve()
    assert [curve.goes_on(n) for n in (1, 2, 4)] == [0.0, 0.5, 0.75]
    assert curve.goes_on(1000) == curve.goes_on(N_MATCHED_MAX) == 1 - 1 / N_MATCHED_MAX
    assert curve.tokens(4, 2) == pytest.approx([1.0, 1.75, 1.75 + 3 / 5])


def test_evidence_by_hand() -> None:
    """A draft of four behind a match of 2 held for two tokens: at 2 and 3 it went on, at 4 it did not."""
    curve = MatchCurve()
    curve.observe(2, 4, 2)
    assert curve.goes_on(2) == pytest.approx((1 + N_GUESSED / 2) / (1 + N_GUESSED))
    assert curve.goes_on(3) == pytest.approx((1 + N_GUESSED * 2 / 3) / (1 + N_GUESSED))
    assert curve.goes_on(4) == pytest.approx((N_GUESSED * 3 / 4) / (1 + N_GUESSED))
    assert curve.goes_on(8) == 1 - 1 / 8, "nothing was seen there"


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(0, 12), st.integers(0, 12)), max_size=40))
def test_chances_are_chances(seen: list[tuple[int, int, int]]) -> None:
    curve = MatchCurve()
    for n_matched, n_draft, n_held in seen:
        curve.observe(n_matched, n_draft, min(n_draft, n_held))
    for n in (1, 2, 3, 5, 31, 32, 33, 200):
        tokens = curve.tokens(n, 8)
        gains = [b - a for a, b in pairwise(tokens)]
        assert all(0.0 <= b <= a for a, b in pairwise([1.0, *gains]))


@pytest.mark.parametrize("chance", [0.2, 0.9])
def test_learns_what_matches_are_worth(chance: float) -> None:
    curve, rng = MatchCurve(), random.Random(0)
    for _ in range(2000):
        curve.observe(5, 1, int(rng.random() < chance))
    assert curve.goes_on(5) == pytest.approx(chance, abs=0.06)


# ---- drafts found in the text ---------------------------------------------------------------------


def play(
    c: MatchForecast, n_steps: int, costs: list[float], n_matched: int, holds: Callable[[int], int]
) -> list[int]:
    """Every step finds a match as long; of a draft so many tokens hold. Returns the lengths."""
    n_drafts = []
    for step in range(n_steps):
        n = c.n_draft_for(n_matched) if c.next_n_draft() else 0
        n_held = min(n, holds(step))
        c.observe(StepRecord(n_draft=n, n_accepted=n_held, n_matched=n_matched * (n > 0), verify_us=costs[n]))
        if n == 0:
            c.observe_passed_over(n_matched, holds(step) > 0)
        n_drafts.append(n)
    return n_drafts


def match_forecast(n_draft_max: int = 8) -> MatchForecast:
    return MatchForecast(Shared(n_draft_max=n_draft_max))


def test_starts_with_plain_steps() -> None:
    """What they take has to be known: one after the prompt, which is none to measure, and two that are."""
    assert play(match_forecast(), 4, MOE, 32, lambda _: 8)[:3] == [0, 0, 0]


def test_nothing_is_drafted_at_a_cap_of_0() -> None:
    c = match_forecast(0)
    assert play(c, 20, MOE, 32, lambda _: 8) == [0] * 20
    assert [decision.why for decision in c.decisions] == ["the best forecast; the cap is 0"]


def test_long_matches_are_drafted_to_the_end_and_short_ones_not() -> None:
    """At once behind 32 tokens, where widths cost what a union of experts does."""
    c = match_forecast()
    assert play(c, 40, MOE, N_MATCHED_MAX, lambda _: 8)[10:].count(8) >= 28
    c.memory.ledger.level = 0.0  # nothing is left to try with
    c._choose()
    assert c.n_draft_for(N_MATCHED_MAX) == 8
    assert c.n_draft_for(2) == 0, "half a token for 0.6 of a step"


def test_what_a_match_is_worth_is_kept_for_the_next_request() -> None:
    shared = Shared(n_draft_max=8)
    play(MatchForecast(shared), 200, MOE, 4, lambda _: 0)
    assert MatchForecast(shared).n_draft_for(4) == 0
    assert MatchForecast(shared).matches.goes_on(4) < 0.3


def test_long_matches_that_fail_are_not_drafted() -> None:
    n_drafts = play(match_forecast(), 400, MOE, 16, lambda _: 0)
    assert n_drafts[100:].count(0) >= 290


def test_where_nothing_holds_little_is_lost() -> None:
    """The ledger's bound: a share of all steps, its capacity, and what single steps overdraw."""
    for costs in (MOE, DEAR):
        n_drafts = play(match_forecast(), 500, costs, 32, lambda _: 0)
        lost = sum(costs[n] / STEP - 1 for n in n_drafts)
        assert lost <= SHARE * 1.2 * 500 + 2 * CAPACITY


def test_where_passes_cost_as_much_as_their_tokens_nothing_pays() -> None:
    """A draft that holds gains 3 % of a token: less than what a mistake costs."""
    n_drafts = play(match_forecast(), 300, DEAR, 6, lambda step: step % 3)
    assert n_drafts[100:].count(0) >= 180


def priced(*costs: float, change: float) -> MatchForecast:
    """One that knows what 1, 2, ... drafted tokens cost, in plain steps, and a change of widths."""
    c = match_forecast()
    c._prices = [Price(1 + i, cost, 0.0, 1.0) for i, cost in enumerate(costs)]
    c._change, c._plain_doubt = change, 0.0
    return c


def test_changes_of_widths_by_hand() -> None:
    """Half of all matches of two go on, two thirds of those of three: 1.5 and 1.83 tokens."""
    c = priced(1.6, 2.1, change=0.5)
    from_plain = [option.utility for option in c._judge_match(2, 0)]
    assert from_plain == pytest.approx([1.0, 1.5 / (1.6 + 0.5), (11 / 6) / (2.1 + 2 / 3)])
    drafting = [option.utility for option in c._judge_match(2, 1)]
    assert drafting == pytest.approx([1.0 / 1.25, 1.5 / (1.6 + 0.25), (11 / 6) / (2.1 + 2 / 3)])


def test_a_choice_depends_on_the_width_before() -> None:
    c = priced(1.2, change=0.5)
    assert c.n_draft_for(2) == 0, "1.5 tokens for 1.7 steps"
    c._n_last = 1
    assert c.n_draft_for(2) == 1, "1.5 tokens for 1.45 steps, and a plain step would take 1.25"
    c._n_last = 0
    assert c.n_draft_for(2) == 0


def test_wide_passes_that_become_dear_lose_little() -> None:
    """Matches are rare and hold for a token; after a while a pass with drafts takes four times as long."""
    c, rng, lost = match_forecast(), random.Random(0), 0.0
    for step in range(2000):
        n = c.n_draft_for(10) if c.next_n_draft() and rng.random() < 0.3 else 0
        us = STEP * ((1.0 + 0.06 * n) * (1 if step < 500 else 4) if n else 1.0)
        c.observe(StepRecord(n_draft=n, n_accepted=min(n, 1), n_matched=10 * (n > 0), verify_us=us))
        lost += us / STEP - 1 - min(n, 1)
    assert lost <= SHARE * 2000 + 2 * CAPACITY


def test_widths_that_stay_are_not_charged_for_changing() -> None:
    """Graphs take half a step when widths change. Behind a long match the length does not change again, so
    it is worth coming to; behind a match of three it is not."""
    c = match_forecast()
    n_last = 0
    for step in range(300):
        is_long = step % 60 < 50
        n = c.n_draft_for(32 if is_long else 3) if c.next_n_draft() else 0
        us = MOE[n] + 0.5 * STEP * (n != n_last)
        n_matched = 32 if is_long else 3
        c.observe(StepRecord(n_draft=n, n_accepted=n * is_long, n_matched=n_matched * (n > 0), verify_us=us))
        n_last = n
    assert c.n_draft_for(32) == 8
    assert c.n_draft_for(3) == 0


def busy_then_calm(seed: int) -> list[int]:
    """Three requests whose drafts hold; six in vain, beside a program that comes and goes; three more."""
    shared, rng, n_drafts = Shared(n_draft_max=8), random.Random(seed), []
    for request in range(12):
        c, is_vain, factor = MatchForecast(shared), 3 <= request < 9, 1.0
        for _ in range(500):
            if is_vain and rng.random() < 0.2:
                factor = 3.0 if rng.random() < 0.3 else 1.0
            n = min(c.next_n_draft(), c.n_draft_for(8))
            us = 1e3 * factor * (1 + 0.25 * n) * rng.uniform(0.95, 1.05)
            n_held = 0 if is_vain else min(n, 4)
            c.observe(StepRecord(n_draft=n, n_accepted=n_held, n_matched=8 * (n > 0), verify_us=us))
            if n == 0:
                c.observe_passed_over(8, not is_vain)
            n_drafts.append(n)
    return n_drafts


@pytest.mark.parametrize("seed", range(4))
def test_drafts_come_back_when_another_program_has_gone(seed: int) -> None:
    n_drafts = busy_then_calm(seed)
    assert sum(n > 0 for n in n_drafts[:1500]) > 1400
    assert sum(n > 0 for n in n_drafts[4500:]) > 1100


def test_a_width_in_doubt_can_be_tried_by_a_full_ledger() -> None:
    """However long nobody has seen it: a token that holds is worth the risk."""
    c = match_forecast(1)
    play(c, 100, MOE, N_MATCHED_MAX, lambda _: 1)
    c.shared.table.passes.n_observed += 10**6
    c._choose()
    assert c.memory.ledger.level == CAPACITY
    _, one = c._judge_match(N_MATCHED_MAX, 0)
    assert 0.0 < one.loss <= CAPACITY
    assert c.n_draft_for(N_MATCHED_MAX) == 1


def test_decisions_say_what_was_found() -> None:
    c = match_forecast()
    play(c, 40, MOE, 20, lambda _: 8)
    assert any("a match of 20 tokens" in decision.why for decision in c.decisions)
    steps = [decision.step for decision in c.decisions]
    assert steps == sorted(steps)
    assert len(steps) < 40


def test_decisions_name_the_step_under_way() -> None:
    c = match_forecast()
    play(c, 100, MOE, N_MATCHED_MAX, lambda _: 8)
    assert c.n_draft_for(2) < 8, "another choice"
    assert c.decisions[-1].step == 100


def test_each_place_has_decisions_of_its_own() -> None:
    """Who goes to and fro between two of them changes no mind."""
    c = match_forecast()
    play(c, 100, MOE, N_MATCHED_MAX, lambda _: 8)
    first = c.n_draft_for(N_MATCHED_MAX), c.n_draft_for(2)
    assert first[0] != first[1]
    n = len(c.decisions)
    for _ in range(10):
        assert (c.n_draft_for(N_MATCHED_MAX), c.n_draft_for(2)) == first
    assert len(c.decisions) == n
