"""Step 4: what to copy, in which order."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pyspac.engine.board import BoardGeometry, LocalBoard, Residency
from pyspac.scheduler.config import SchedulerConfig
from pyspac.scheduler.occupancy import Occupancy
from pyspac.scheduler.prefetch import Prefetcher, PrefetchPlan, n_admitted

R, A, Q = Residency.RESIDENT, Residency.ABSENT, Residency.QUEUED


def make_plan(
    utility: list[list[int]],
    tau: list[int],
    residency: list[list[int]],
    *,
    slots: int = 100,
    expert_bytes: list[int] | None = None,
    group: list[int] | None = None,
    counts: list[list[int]] | None = None,
    byte_limit: int | None = None,
    **config: object,
) -> PrefetchPlan:
    n_layer, n_expert = len(utility), len(utility[0])
    board = LocalBoard(
        BoardGeometry(
            n_layer=n_layer, n_expert=n_expert, n_expert_used=1, expert_bytes=expert_bytes or [10] * n_layer,
            group=group or [0] * n_layer, group_slots=[slots] * n_layer,
        )
    )  # fmt: skip
    settings = SchedulerConfig(**{"payback_steps": 0.0, **config})  # type: ignore[arg-type]
    return Prefetcher(board, settings).plan(
        np.array(utility, np.uint8), np.array(tau, np.uint8),
        Occupancy(board).read(np.array(residency, np.uint8)),
        np.array(counts if counts is not None else np.zeros((n_layer, n_expert)), np.uint32),
        np.linspace(0.0, 1.0, 256), [byte_limit],
    )  # fmt: skip


def test_plan_by_hand() -> None:
    # Two layers of three experts, tau = 2 and 3. Hot: (0,0) u=2, (0,2) u=4, (1,0) u=3, (1,2) u=4; (1,1) u=2
    # is below its layer's tau. (1,0) is resident. Flat = layer * 3 + expert: (0,2) = 2 and (1,2) = 5 at level
    # 4, then (0,0) = 0.
    plan = make_plan([[2, 0, 4], [3, 2, 4]], [2, 3], [[A, A, A], [R, A, A]])
    assert plan.load.tolist() == [2, 5, 0]
    assert plan.n_load == 3


def test_queued_and_loading_are_not_asked_for_again() -> None:
    assert make_plan([[4, 4, 4]], [1], [[Q, Residency.LOADING, A]]).load.tolist() == [2]


def test_equals_go_by_recent_activations_per_byte_then_layer() -> None:
    plan = make_plan(
        [[3, 3], [3, 3]], [1, 1], [[A, A], [A, A]], counts=[[1, 3], [4, 0]], expert_bytes=[10, 20]
    )
    # per byte: (0,0) 0.1, (0,1) 0.3, (1,0) 0.2, (1,1) 0
    assert plan.load.tolist() == [1, 2, 0, 3]


def test_layers_that_are_not_split_load_nothing() -> None:
    assert make_plan([[3, 3], [3, 3]], [1, 1], [[A, A], [A, A]], expert_bytes=[0, 10]).load.tolist() == [2, 3]


def test_full_pool_swaps_only_for_the_better() -> None:
    # one group, three slots, all held: (0,3) u=0, (0,4) u=1, (0,5) u=2 below tau = 3. Newcomers 5, 4, 3 beat
    # 0, 1, 2.
    utility = [[5, 4, 3, 0, 1, 2]]
    assert make_plan(utility, [3], [[A, A, A, R, R, R]], slots=3).load.tolist() == [0, 1, 2]
    # residents at or above tau are no victims
    assert make_plan(utility, [2], [[A, A, A, R, R, R]], slots=3).load.tolist() == [0, 1]


def test_payback_asks_for_a_margin() -> None:
    # worth = level / 255. Newcomer 100 against victim 90: gain 0.039; within 20 steps 0.78 copies are saved:
    # no.
    residency, utility = [[A, R]], [[100, 90]]
    assert make_plan(utility, [95], residency, slots=1, payback_steps=20.0).n_load == 0
    assert make_plan(utility, [95], residency, slots=1, payback_steps=30.0).n_load == 1
    assert (
        make_plan(utility, [95], residency, slots=2, payback_steps=20.0).n_load == 1
    )  # a free slot costs nobody


def test_without_evict_only_free_slots_are_filled() -> None:
    plan = make_plan([[5, 4, 0]], [1], [[A, A, R]], slots=2, without={"evict"})
    assert plan.load.tolist() == [0]


def test_groups_do_not_share_slots() -> None:
    plan = make_plan([[5, 4], [3, 2]], [1, 1], [[A, A], [A, A]], slots=1, group=[0, 1])
    assert plan.load.tolist() == [0, 2]


def test_byte_limit_counts_what_is_under_way() -> None:
    utility, residency = [[5, 4, 3, 2]], [[A, A, A, Q]]
    assert make_plan(utility, [1], residency, byte_limit=30).load.tolist() == [0, 1]
    assert make_plan(utility, [1], residency, byte_limit=5).n_load == 0
    # with nothing under way one copy may go, however small the budget: else nothing would ever move
    assert make_plan(utility, [1], [[A, A, A, A]], byte_limit=5).load.tolist() == [0]


def test_admission_by_hand() -> None:
    # worth = level. Newcomers 9 7 4, one free slot, victims 3 5: 9 is free, 7 - 3 = 4 >= 2, 4 - 5 < 2
    worth = np.arange(10.0)
    assert admitted([9, 7, 4], 1, [3, 5], worth, 2.0) == 2
    assert admitted([9, 7, 4], -1, [3, 5], worth, 2.0) == 2  # 9 - 3, 7 - 5
    assert admitted([9], 5, [], worth, 2.0) == 1


def test_only_a_higher_level_takes_a_slot() -> None:
    """Also where no margin is asked for, and where levels are worth the same by chance."""
    worth = np.array([0.0, 0.5, 0.5, 0.5])
    assert admitted([3, 2], 0, [2, 2], worth, 0.0) == 1
    assert admitted([3], 0, [2], worth, 0.1) == 0


def admitted(newcomers: list[int], n_free: int, victims: list[int], worth: np.ndarray, margin: float) -> int:
    return n_admitted(np.array(newcomers, np.uint8), n_free, np.array(victims, np.uint8), worth, margin)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_the_order_in_plain_python(seed: int) -> None:
    rng = np.random.default_rng(seed)
    utility, counts = rng.integers(0, 4, (3, 6)), rng.integers(0, 5, (3, 6))
    expert_bytes = rng.choice([10, 15, 20, 7], 3).tolist()
    plan = make_plan(
        utility.tolist(), [2, 1, 3], [[A] * 6] * 3, counts=counts.tolist(), expert_bytes=expert_bytes
    )
    hot = [(il, ie) for il in range(3) for ie in range(6) if utility[il, ie] >= [2, 1, 3][il]]
    hot.sort(
        key=lambda e: (-int(utility[e]), -Fraction(int(counts[e]), expert_bytes[e[0]]), e[0], e[1])
    )  # level, activations per byte, layer
    assert plan.load.tolist() == [il * 6 + ie for il, ie in hot]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 30))
def test_plans_keep_their_promises(seed: int, slots: int) -> None:
    rng = np.random.default_rng(seed)
    utility = rng.integers(0, 8, (3, 8))
    tau = rng.integers(1, 8, 3)
    residency = np.zeros(24, int)
    residency[rng.permutation(24)[: min(slots, 24) * 2 // 3]] = R
    residency = residency.reshape(3, 8)
    plan = make_plan(utility.tolist(), tau.tolist(), residency.tolist(), slots=slots)
    levels = utility.ravel()[plan.load]
    assert np.all(np.diff(levels) <= 0)
    assert len(set(plan.load.tolist())) == plan.n_load
    assert np.all(residency.ravel()[plan.load] == A)
    assert np.all(levels >= tau[plan.load // 8])
    n_victims = int(((residency == R) & (utility < tau[:, None])).sum())
    assert plan.n_load <= slots - int((residency > 0).sum()) + n_victims
