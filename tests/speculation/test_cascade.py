"""pyspac.speculation.cascade: the paper's state machine, with scripted costs and acceptances."""

from __future__ import annotations

from itertools import pairwise

import pytest
from scripted import always, play

from pyspac.engine.step import StepRecord
from pyspac.errors import ConfigError
from pyspac.speculation.cascade import Cascade, CascadeConfig, Trial, next_trial
from pyspac.speculation.controller import Shared

FLAT = [100.0] * 9  # verification for nothing
LINEAR = [100.0 * (1 + k) for k in range(9)]  # as dear as one by one
CONFIG = CascadeConfig()


def cascade(n_draft_max: int = 8, **config: object) -> Cascade:
    return Cascade(Shared(n_draft_max=n_draft_max), CascadeConfig(**config))  # type: ignore[arg-type]


def runs(n_drafts: list[int]) -> list[tuple[int, int]]:
    """(draft length, steps in a row)"""
    found: list[tuple[int, int]] = []
    for n in n_drafts:
        if found and found[-1][0] == n:
            found[-1] = (n, found[-1][1] + 1)
        else:
            found.append((n, 1))
    return found


def test_worked_by_hand() -> None:
    """Costs 1, 1.5, 2, 2.5, 3; two drafts hold.

    Baseline: 4 steps at K = 0, 100 us. Test from K = 3: ETR 3, cost 2.5, U = 1.2 >= 1, so up: K = 4: U = 3 /
    3 = 1.0, less, so turn: 3 is tried, K = 2: U = 3 / 2 = 1.5, more, so on: K = 1: U = 2 / 1.5 = 1.33, the
    fourth trial. Set: K = 2 for 16 steps; the next test starts there.
    """
    c = cascade()
    played = play(c, 4 + 16 + 16 + 4, [100, 150, 200, 250, 300, 350, 400, 450, 500], always(2))
    assert runs(played.n_drafts) == [(0, 4), (3, 4), (4, 4), (2, 4), (1, 4), (2, 16 + 4)]
    tests = [(d.n_draft, d.why) for d in c.decisions if d.phase == "test"]
    assert tests[0] == (3, "K_start")
    sets = [d for d in c.decisions if d.phase == "set"]
    assert sets[0].utilities == pytest.approx({3: 1.2, 4: 1.0, 2: 1.5, 1: 4 / 3})
    assert sets[0].why == "4 trials"


def test_off_when_no_utility_reaches_one_and_back_off_doubles() -> None:
    """Nothing holds. Test 3, 2, 1: utilities 1/4, 1/3, 1/2; then K = 0 for 16, K = 1, 0 for 32, ..."""
    c = cascade()
    played = play(c, 4 + 12 + 16 + 4 + 32 + 4 + 64 + 4 + 128 + 4 + 256 + 4 + 256, LINEAR, always(0))
    assert runs(played.n_drafts) == [
        (0, 4), (3, 4), (2, 4), (1, 4), (0, 16), (1, 4), (0, 32), (1, 4), (0, 64), (1, 4), (0, 128),
        (1, 4), (0, 256), (1, 4), (0, 256),
    ]  # fmt: skip


def test_set_phase_is_short_again_once_speculation_pays() -> None:
    c = cascade()
    n_bad = 4 + 12 + 16 + 4 + 32
    play(c, n_bad, LINEAR, always(0))
    good = play(c, 4 * 4 + 16 + 4, FLAT, lambda step, k: k, first=n_bad)
    # K = 1 pays: U = 2; up the hill in four trials, then 16 steps at the best, then the test starts there
    assert runs(good.n_drafts) == [(1, 4), (2, 4), (3, 4), (4, 4 + 16 + 4)]
    bad = play(c, 60, LINEAR, always(0))
    assert (0, 16) in runs(bad.n_drafts), "the back-off starts over"


def test_exits_when_utilities_converge() -> None:
    """A constant utility: K = 3 gives 1.05, K = 4 gives 1.05; one more trial would tell nothing."""
    c = cascade()
    costs = [100.0] + [100 * (1 + k) / 1.05 for k in range(1, 9)]
    played = play(c, 4 + 8 + 16, costs, lambda step, k: k)
    assert runs(played.n_drafts)[:3] == [(0, 4), (3, 4), (4, 4)]
    assert c.decisions[3].why == "converged within 10%"


@pytest.mark.parametrize(
    ("trials", "n_draft", "why"),
    [
        ([Trial(3, 1.5)], 4, "up"),
        ([Trial(3, 0.9)], 2, "down"),
        ([Trial(8, 1.5)], 7, "down"),
        ([Trial(1, 0.9)], None, "utility below 1 at K = 1"),
        ([Trial(3, 1.2), Trial(4, 1.5)], 5, "up"),
        ([Trial(3, 1.5), Trial(4, 1.2)], 2, "down"),
        ([Trial(3, 0.6), Trial(2, 0.8)], 1, "down"),
        ([Trial(3, 0.9), Trial(2, 0.7)], 4, "up"),
        ([Trial(7, 1.2), Trial(8, 1.5)], None, "K reached the cap"),
        ([Trial(1, 1.5), Trial(2, 1.1)], None, "K reached 0"),
        ([Trial(3, 1.5), Trial(4, 1.3), Trial(2, 1.1)], None, "utility fell twice"),
        ([Trial(3, 1.5), Trial(4, 1.6)], None, "converged within 10%"),
    ],
)
def test_next_trial(trials: list[Trial], n_draft: int | None, why: str) -> None:
    assert next_trial(trials, 8, CONFIG) == (n_draft, why)


class TestWithout:
    """Figure 18: each optimisation can be taken away."""

    def test_everything_is_static(self) -> None:
        c = cascade(without=frozenset({"disable", "backoff", "climb"}))
        played = play(c, 200, LINEAR, always(0))
        assert set(played.n_drafts[4:]) <= {0, 3}
        assert played.n_drafts.count(0) <= 4 + 8, "only baselines"

    def test_disable_only(self) -> None:
        c = cascade(without=frozenset({"backoff", "climb"}))
        played = play(c, 4 + 3 * 20, LINEAR, always(0))
        assert runs(played.n_drafts) == [(0, 4), (3, 4), (0, 16), (3, 4), (0, 16), (3, 4), (0, 16)]

    def test_back_off_but_no_climb(self) -> None:
        c = cascade(without=frozenset({"climb"}))
        played = play(c, 4 + 20 + 36 + 68, LINEAR, always(0))
        assert runs(played.n_drafts) == [(0, 4), (3, 4), (0, 16), (3, 4), (0, 32), (3, 4), (0, 64)]

    def test_unknown_name(self) -> None:
        with pytest.raises(ConfigError, match="backoff"):
            CascadeConfig(without=frozenset({"speed"}))


def test_decisions_name_the_first_step_for_which_they_hold() -> None:
    c = cascade()
    n_drafts = play(c, 200, LINEAR, always(1)).n_drafts
    for decision in c.decisions:
        n_steps = min(decision.n_steps or 0, 200 - decision.step)
        assert n_drafts[decision.step : decision.step + n_steps] == [decision.n_draft] * n_steps


def test_baseline_is_renewed_about_every_hundred_steps() -> None:
    c = cascade()
    play(c, 400, FLAT, lambda step, k: k)
    starts = [d.step for d in c.decisions if d.phase == "baseline"]
    assert starts[0] == 0
    assert all(100 <= b - a <= 140 for a, b in pairwise(starts))
    assert len(starts) >= 3


def test_plain_set_phase_renews_the_baseline() -> None:
    """The machine becomes twice as slow while speculation is off: the next test compares with that."""
    c = cascade()
    play(c, 4 + 12 + 16, LINEAR, always(0))
    assert c.analyzer.base_us == 100
    play(c, 4, LINEAR, always(0))
    play(c, 32, [200.0] * 9, always(0))
    assert c.analyzer.base_us == 200


def test_a_page_fault_in_the_baseline_moves_nothing() -> None:
    c = cascade()
    for us in (100, 9000, 100, 100):
        c.observe(StepRecord(n_draft=0, n_accepted=0, verify_us=us))
    assert c.analyzer.base_us == 100


def test_next_request_starts_from_history() -> None:
    shared = Shared(n_draft_max=8)
    play(Cascade(shared), 40, [100, 150, 200, 250, 300, 350, 400, 450, 500], always(2))
    second = Cascade(shared)
    play(second, 4, FLAT, always(2))
    assert second.next_n_draft() == 2
    assert second.decisions[-1].why == "the best of recent history"


def test_lag_leaves_out_steps_of_the_length_before() -> None:
    """One late step per change: its time and tokens belong to the old draft length."""
    shared = Shared(n_draft_max=8, lag_steps=1)
    c = Cascade(shared, CascadeConfig(n_trials=1))
    wanted = 0
    for _ in range(60):
        in_force, wanted = wanted, c.next_n_draft()  # the limit arrives one step late
        c.observe(StepRecord(n_draft=in_force, n_accepted=in_force, verify_us=FLAT[in_force]))
    sets = [d for d in c.decisions if d.phase == "set"]
    assert sets[0].utilities == {3: 4.0}, "four steps at K = 3 and nothing else"


def test_cap_of_zero_is_off_for_good() -> None:
    assert set(play(cascade(0), 300, FLAT, always(0)).n_drafts) == {0}
