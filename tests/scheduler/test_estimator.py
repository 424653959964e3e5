"""Step 2: counts to utility levels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyspac.scheduler.config import ESTIMATORS, SchedulerConfig
from pyspac.scheduler.estimator import SpacEstimator, make_estimator


def spac(**settings: object) -> SpacEstimator:
    estimator = make_estimator(1, 1, SchedulerConfig(estimator="spac", **settings))  # type: ignore[arg-type]
    assert isinstance(estimator, SpacEstimator)
    return estimator


def run(estimator: SpacEstimator, frequencies: Sequence[int]) -> list[tuple[int, int, int]]:
    """Feed one expert's counts; return (level, up, down) after each."""
    states = []
    for frequency in frequencies:
        level = estimator.update(np.array([[frequency]], np.uint32), 9)
        states.append((int(level[0, 0]), int(estimator.up[0, 0]), int(estimator.down[0, 0])))
    return states


def test_spac_by_hand() -> None:
    # gamma = 8: up = down = floor(8 / 2) = 4; lambda = 0.1; f starts at 0.
    # f = 5: d = +5 >= 4: level 1. up = floor(0.9 * 4 + 0.1 * 5) = floor(4.1) = 4.
    # f = 7: d = +2 <  4: stays.   up = floor(3.6 + 0.2) = 3.
    # f = 7: d =  0:      stays; boundaries stay.
    # f = 4: d = -3, 3 < down 4: stays. down = floor(3.6 + 0.3) = 3.
    # f = 7: d = +3 >= up 3: level 2. up = floor(2.7 + 0.3) = 3.
    # f = 0: d = -7, 7 >= down 3: level 1. down = floor(2.7 + 0.7) = 3.
    assert run(spac(), [5, 7, 7, 4, 7, 0]) == [
        (1, 4, 4),
        (1, 3, 4),
        (1, 3, 4),
        (1, 3, 3),
        (2, 3, 3),
        (1, 3, 3),
    ]


def test_spac_moves_by_the_old_boundary() -> None:
    # d = +3 is below the old boundary 4 and equals the new one floor(3.6 + 0.3) = 3: no move yet.
    assert run(spac(), [3]) == [(0, 3, 4)]


def test_spac_boundary_ratchets_down_to_one() -> None:
    # the published rule: 4 -> 3 -> 2 -> 1 by three small rises; floor(0.9 + 0.1 * d) = 1 for every d from 1
    # to 10
    states = run(spac(), [1, 2, 3, 4])
    assert [up for _, up, _ in states] == [3, 2, 1, 1]
    assert run(spac(), [1, 2, 3] + [3, 9] * 20)[-1][1] == 1


def test_spac_leaves_an_expert_that_is_always_busy_where_it_is() -> None:
    # d = +9 lifts once; then d = 0 for ever, below any boundary of 1 or more
    assert [level for level, _, _ in run(spac(), [9] * 10)] == [1] * 10


@pytest.mark.parametrize(("n_draft_max", "start"), [(0, 4), (1, 1), (2, 1), (4, 2), (16, 8)])
def test_spac_boundaries_start_at_half_of_gamma_and_never_at_zero(n_draft_max: int, start: int) -> None:
    # at 0 an idle expert (d = 0 >= 0) would rise by one in every step, and the boundary could not leave 0
    assert run(spac(n_draft_max=n_draft_max), [0] * 6) == [(0, start, start)] * 6


def test_spac_without_drafts_ranks_busy_above_idle() -> None:
    # used, not, used, ...: the boundaries fall to 1 in three rises and falls, and then it moves with its use
    levels = [level for level, _, _ in run(spac(n_draft_max=0), [1, 0] * 10)]
    assert max(levels) == 1
    assert levels[6:] == [1, 0] * 7


def test_spac_without_adaptive_boundaries() -> None:
    # up = 3, down = 1, fixed: +3 up, +2 stay, -1 down
    assert run(spac(without={"adabc"}), [3, 5, 4]) == [(1, 3, 1), (1, 3, 1), (0, 3, 1)]


def test_spac_binary() -> None:
    assert [level for level, _, _ in run(spac(without={"specue"}), [5, 9, 0])] == [1, 1, 0]


def reference_spac(frequencies: list[int], k: int, gamma: int) -> list[int]:
    """Algorithm 1 for one expert, lambda = 1/10, in whole numbers."""
    level, up, down, before, levels = 0, gamma // 2, gamma // 2, 0, []
    for f in frequencies:
        d = f - before
        if d >= up:
            level = min(k, level + 1)
        elif -d >= down:
            level = max(0, level - 1)
        if d > 0:
            up = (9 * up + d) // 10
        elif d < 0:
            down = (9 * down - d) // 10
        before = f
        levels.append(level)
    return levels


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 17), max_size=30), st.integers(1, 8), st.integers(2, 16))
def test_spac_equals_the_algorithm(frequencies: list[int], k: int, gamma: int) -> None:
    got = [level for level, _, _ in run(spac(n_levels=k, n_draft_max=gamma), frequencies)]
    assert got == reference_spac(frequencies, k, gamma)


def test_ema_by_hand() -> None:
    # decay 0.5 per token, 4 levels; level = round(4 * sqrt(rate)).
    # Step 1, one token:  expert 0 used. sum = [1, 0], tokens = 1: rate [1, 0] -> [4, 0].
    # Step 2, two tokens: expert 1 used in both. decay 0.25: sum = [0.25, 2], tokens = 2.25:
    #   rate [0.111, 0.889] -> 4 * [0.333, 0.943] = [1.33, 3.77] -> [1, 4].
    estimator = make_estimator(1, 2, SchedulerConfig(ema_decay=0.5, n_levels=4))
    assert estimator.update(np.array([[1, 0]], np.uint32), 1).tolist() == [[4, 0]]
    assert estimator.update(np.array([[0, 2]], np.uint32), 2).tolist() == [[1, 4]]


def test_ema_does_not_depend_on_the_draft_length() -> None:
    config = SchedulerConfig(n_levels=64)
    wide, narrow = make_estimator(1, 3, config), make_estimator(1, 3, config)
    for _ in range(200):
        wide.update(np.array([[4, 2, 0]], np.uint32), 4)
        for token in ([1, 1, 0], [1, 0, 0], [1, 1, 0], [1, 0, 0]):
            narrow.update(np.array([token], np.uint32), 1)
    assert np.abs(wide.utility.astype(int) - narrow.utility.astype(int)).max() <= 2


def test_lru_ages_by_one_level_per_step() -> None:
    estimator = make_estimator(1, 3, SchedulerConfig(estimator="lru", n_levels=3))
    estimator.update(np.array([[1, 0, 0]], np.uint32), 1)
    assert estimator.update(np.array([[0, 5, 0]], np.uint32), 5).tolist() == [[2, 3, 0]]
    for _ in range(5):
        estimator.update(np.zeros((1, 3), np.uint32), 1)
    assert estimator.utility.tolist() == [[0, 0, 0]]


def test_lfu_remembers_everything() -> None:
    estimator = make_estimator(1, 2, SchedulerConfig(estimator="lfu", n_levels=4))
    estimator.update(np.array([[4, 0]], np.uint32), 4)
    # after 12 more tokens without it: 4 / 16 -> 4 * sqrt(0.25) = 2; the other 12 / 16 -> 3.46 -> 3
    assert estimator.update(np.array([[0, 12]], np.uint32), 12).tolist() == [[2, 3]]


def test_last_caps_the_counts() -> None:
    estimator = make_estimator(1, 3, SchedulerConfig(estimator="last", n_levels=4))
    assert estimator.update(np.array([[9, 2, 0]], np.uint32), 9).tolist() == [[4, 2, 0]]


def test_static_freezes() -> None:
    estimator = make_estimator(1, 2, SchedulerConfig(estimator="static", static_steps=2, n_levels=4))
    for counts in ([[1, 0]], [[1, 0]]):
        estimator.update(np.array(counts, np.uint32), 1)
    assert estimator.update(np.array([[0, 9]], np.uint32), 9).tolist() == [[4, 0]]


def test_specue_of_other_estimators_is_binary() -> None:
    estimator = make_estimator(1, 3, SchedulerConfig(estimator="ema", without={"specue"}))
    assert estimator.update(np.array([[9, 1, 0]], np.uint32), 9).tolist() == [[1, 1, 0]]
    assert estimator.update(np.array([[0, 1, 0]], np.uint32), 9).tolist() == [[0, 1, 0]]


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_levels_stay_in_range_and_in_place(name: str, data: st.DataObject) -> None:
    n_levels = data.draw(st.integers(1, 255))
    estimator = make_estimator(2, 3, SchedulerConfig(estimator=name, n_levels=n_levels))
    out = estimator.utility
    for _ in range(data.draw(st.integers(1, 6))):
        n_tokens = data.draw(st.integers(1, 17))
        counts = data.draw(st.lists(st.integers(0, n_tokens), min_size=6, max_size=6))
        assert estimator.update(np.array(counts, np.uint32).reshape(2, 3), n_tokens) is out
        assert out.dtype == np.uint8
        assert int(out.max()) <= n_levels


@pytest.mark.parametrize("name", ["ema", "lfu"])
def test_sums_of_unused_experts_end_at_zero(name: str) -> None:
    """Denormal numbers take many times as long to multiply."""
    estimator = make_estimator(1, 4, SchedulerConfig(estimator=name))
    estimator.update(np.array([[1, 0, 0, 0]], np.uint32), 1)
    for _ in range(3000):
        estimator.update(np.array([[0, 1, 0, 0]], np.uint32), 2)
    sums = estimator._sum  # type: ignore[attr-defined]
    assert np.all((sums == 0) | (sums > np.finfo(np.float32).tiny))
    assert sums[0, 1] > 0


def learn(estimator: Any, rates: Sequence[float], n_tokens: int) -> None:
    """A prompt of n_tokens that used the experts of the one layer with these rates."""
    counts = np.array([[round(rate * n_tokens) for rate in rates]], np.uint32)
    estimator.learn_prompt(counts, np.array([n_tokens]))


@pytest.mark.parametrize("name", ["ema", "lfu", "static"])
def test_a_prompt_gives_the_order_of_its_rates(name: str) -> None:
    estimator = make_estimator(1, 3, SchedulerConfig(estimator=name))
    learn(estimator, [1.0, 0.25, 0.0], 400)
    assert estimator.utility.tolist() == [[16, 8, 0]]  # 16 * sqrt(rate)


@pytest.mark.parametrize("name", ["spac", "lru", "last"])
def test_rules_about_steps_hear_no_prompt(name: str) -> None:
    estimator = make_estimator(1, 3, SchedulerConfig(estimator=name))
    learn(estimator, [1.0, 0.25, 0.0], 400)
    assert not estimator.utility.any()


def test_what_follows_a_prompt_soon_outweighs_it() -> None:
    estimator = make_estimator(1, 2, SchedulerConfig())
    learn(estimator, [1.0, 0.0], 1000)
    for _ in range(12):
        estimator.update(np.array([[0, 1]], np.uint32), 1)
    assert estimator.utility[0, 1] > estimator.utility[0, 0]


def test_a_long_prompt_leaves_more_than_half_of_what_was_known() -> None:
    estimator = make_estimator(1, 2, SchedulerConfig())
    for _ in range(200):
        estimator.update(np.array([[1, 0]], np.uint32), 1)
    for n_tokens in (1, 100, 100_000):
        other = make_estimator(1, 2, SchedulerConfig())
        assert other.restore(estimator.state())
        learn(other, [0.0, 1.0], n_tokens)
        assert other.utility[0, 0] > other.utility[0, 1] > 0, n_tokens


def test_layers_of_a_prompt_have_tokens_of_their_own() -> None:
    # the last layer ran for one token of 100, and a third one for none
    estimator = make_estimator(3, 2, SchedulerConfig())
    estimator.update(np.array([[0, 1], [0, 1], [0, 1]], np.uint32), 1)
    estimator.learn_prompt(np.array([[100, 0], [1, 0], [0, 0]], np.uint32), np.array([100, 1, 0]))
    level = estimator.utility
    assert level[0, 0] > level[1, 0] > level[2, 0] == 0
    assert level[0, 1] < level[1, 1] < level[2, 1] == 16


def test_a_swap_must_pay_while_it_is_remembered() -> None:
    assert SchedulerConfig(ema_decay=0.96).effective_payback_steps == pytest.approx(25.0)
    assert SchedulerConfig(ema_decay=0.96, payback_steps=3.0).effective_payback_steps == 3.0
    assert SchedulerConfig(estimator="lfu").effective_payback_steps == 0.0


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_state_with_what_is_no_number_is_not_taken_over(value: float) -> None:
    estimator = make_estimator(1, 2, SchedulerConfig())
    estimator.update(np.array([[3, 1]], np.uint32), 1)
    state = {name: array.copy() for name, array in estimator.state().items()}
    state["sum"].flat[0] = value
    before = estimator.utility.copy()
    assert not estimator.restore(state)
    assert np.array_equal(estimator.utility, before)
