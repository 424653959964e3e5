"""Looking ahead: what a prediction moves, what it must not, and what is told of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from test_scheduler import Router, make, run

from pyspac.engine.board import BoardGeometry, LocalBoard, Residency
from pyspac.errors import ConfigError
from pyspac.scheduler.config import SchedulerConfig, parse_predictors
from pyspac.scheduler.cost_model import MIN_COPY_PRICE, CostModel
from pyspac.scheduler.foresight import make_foresight
from pyspac.scheduler.occupancy import Occupancy
from pyspac.scheduler.plan_ahead import AheadPlanner, Decided
from pyspac.scheduler.prefetch import EMPTY_PLAN, Prefetcher, PrefetchPlan
from pyspac.scheduler.scheduler import Scheduler

R, A, Q = Residency.RESIDENT, Residency.ABSENT, Residency.QUEUED
N_LAYER, N_EXPERT, N_USED = 2, 6, 2


def plan_ahead(
    utility: list[list[int]],
    tau: list[int],
    residency: list[list[int]],
    chance: list[list[float]],
    *,
    worth: list[float],
    slots: int,
    byte_limit: int | None = None,
    link_us: float | None = None,
    lead_us: float = 0.0,
) -> tuple[PrefetchPlan, NDArray[np.uint8]]:
    n_layer, n_expert = len(utility), len(utility[0])
    board = LocalBoard(
        BoardGeometry.uniform(
            n_layer=n_layer, n_expert=n_expert, n_expert_used=1, n_slots=slots, expert_bytes=10
        )
    )
    config = SchedulerConfig(n_levels=len(worth) - 1, payback_steps=10.0)
    cost = CostModel(board)
    if link_us is not None:
        cost._link_us, cost._link_bytes, cost.step_us = [link_us], [1.0], 100.0
    decided = Decided(
        utility=np.array(utility, np.uint8), tau=np.array(tau, np.uint8),
        counts=np.zeros((n_layer, n_expert), np.uint32), worth=np.array(worth), byte_limits=[byte_limit],
    )  # fmt: skip
    occupancy = Occupancy(board).read(np.array(residency, np.uint8))
    return AheadPlanner(Prefetcher(board, config), config, cost).plan(
        decided, occupancy, np.array(chance, np.float32), lead_us
    )


def test_a_prediction_tips_the_scales() -> None:
    # H = 10, a copy costs one use. Levels are worth 0, 0.1, 0.2 uses per step. Two slots, held by experts of
    # level 1 (0.1). The absent expert 2 is of level 2: in 10 steps 2 uses, against 1 of its victim: 2 - 1 = 1
    # pays anyway. Expert 3 of level 1 is no better than anyone; predicted at 0.5 its ten steps are worth
    # 0.5 + 9 * 0.1 = 1.4: 0.4 more than its victim's, which does not pay.
    plan, _ = plan_ahead([[1, 1, 2, 1]], [2], [[R, R, A, A]], [[0, 0, 0, 0.5]], worth=[0, 0.1, 0.2], slots=2)
    assert (plan.load.tolist(), plan.ahead.tolist(), plan.n_refused) == ([2], [], 1)
    # At 0.9, against a victim of level 0: 0.9 + 0.9 - 0 = 1.8 pays; without the prediction 1.0 - 0 pays too,
    # so only the threshold kept it out.
    plan, levels = plan_ahead(
        [[0, 1, 2, 1]], [2], [[R, R, R, A]], [[0, 0, 0, 0.9]], worth=[0, 0.1, 0.2], slots=3
    )
    assert (plan.load.tolist(), plan.ahead.tolist(), plan.n_refused) == ([3], [3], 0)
    assert levels.tolist() == [[0, 1, 2, 3]]  # first in the engine's queue, above every level


def test_what_is_predicted_may_drive_out_what_is_hot() -> None:
    # A slot, held by expert 0 of level 2: 0.3 uses per step, 3 in ten steps. Expert 1 of the same level is
    # predicted at 1: 1 + 9 * 0.3 = 3.7 uses are 0.7 more. Of level 3, 0.4 per step: 1 + 3.6 = 4.6 pay.
    plan, _ = plan_ahead([[2, 2]], [2], [[R, A]], [[0, 1.0]], worth=[0, 0.1, 0.3, 0.4], slots=1)
    assert plan.n_load == 0
    plan, levels = plan_ahead([[2, 3]], [2], [[R, A]], [[0, 1.0]], worth=[0, 0.1, 0.3, 0.4], slots=1)
    assert plan.load.tolist() == plan.ahead.tolist() == [1]
    assert levels.tolist() == [[1, 4]]  # below the threshold, so that the engine may evict it
    plan, _ = plan_ahead([[2, 3]], [2], [[R, A]], [[0.1, 0]], worth=[0, 0.1, 0.3, 0.9], slots=1)
    assert plan.n_load == 0  # nobody else may


def test_what_is_predicted_and_resident_never_leaves() -> None:
    # the newcomer of level 2 would take the place of expert 0, which is worth nothing but predicted
    arguments = ([[0, 1, 2]], [2], [[R, R, A]])
    plan, levels = plan_ahead(*arguments, [[0.3, 0, 0]], worth=[0, 0.1, 0.9], slots=2)
    assert plan.load.tolist() == [2]
    assert levels.tolist() == [[2, 1, 2]]  # as high as the threshold: the engine evicts none of those
    plan, levels = plan_ahead(*arguments, [[0.3, 0.2, 0]], worth=[0, 0.1, 0.9], slots=2)
    assert plan.n_load == 0


def test_free_slots_take_what_is_predicted() -> None:
    plan, levels = plan_ahead(
        [[1, 0, 0, 2]], [2], [[A, A, Q, A]], [[0, 0.5, 0.5, 0]], worth=[0, 0.1, 0.2], slots=3
    )
    assert plan.load.tolist() == [1, 3]  # what comes next is copied first
    assert levels.tolist() == [[1, 3, 2, 2]]  # the one that waits stays wanted


def test_the_budget_cuts_what_is_needed_last() -> None:
    plan, _ = plan_ahead(
        [[2, 0, 2]], [2], [[A, A, A]], [[0, 0.5, 0]], worth=[0, 0.1, 0.2], slots=3, byte_limit=20
    )
    assert plan.load.tolist() == [1, 0]
    assert plan.ahead.tolist() == [1]


def test_what_would_come_too_late_is_left_out() -> None:
    # 10 bytes take 20 us. The step takes 100 us, so layer 1 begins after 50: two copies can be there by then,
    # none for layer 0; with 20 us before the forward, the one for layer 0 too.
    chance = [[0.5, 0, 0, 0], [0.5, 0.5, 0.5, 0]]
    for lead_us, expected in ((0.0, [4]), (20.0, [0, 4, 5])):
        plan, _ = plan_ahead(
            [[0] * 4] * 2,
            [2, 2],
            [[A] * 4] * 2,
            chance,
            worth=[0, 0.1, 0.2],
            slots=8,
            link_us=2.0,
            lead_us=lead_us,
        )
        assert plan.load.tolist() == expected
        assert plan.n_late == 4 - len(expected)


def test_what_was_not_copied_counts_whatever_the_reason() -> None:
    board = LocalBoard(BoardGeometry.uniform(n_layer=1, n_expert=4, n_expert_used=1, n_slots=2))
    foresight = make_foresight(board, ["token"])
    assert foresight is not None
    foresight.note_plan(replace(EMPTY_PLAN, n_refused=3, n_late=2))
    assert (foresight.stats.n_refused, foresight.stats.n_late) == (5, 2)


def test_without_a_prediction_the_plan_is_the_same() -> None:
    """Nothing is named: both planners agree, on random states."""
    rng = np.random.default_rng(4)
    config = SchedulerConfig(n_levels=8, payback_steps=10.0)
    for _ in range(50):
        board = LocalBoard(
            BoardGeometry.uniform(n_layer=3, n_expert=9, n_expert_used=1, n_slots=int(rng.integers(1, 27)))
        )
        base = Prefetcher(board, config)
        residency = np.zeros(27, np.uint8)
        residency[rng.permutation(27)[: board.n_slots]] = R
        occupancy = Occupancy(board).read(residency.reshape(3, 9))
        decided = Decided(
            utility=rng.integers(0, 9, (3, 9)).astype(np.uint8), tau=rng.integers(1, 9, 3).astype(np.uint8),
            counts=rng.integers(0, 3, (3, 9)).astype(np.uint32), worth=np.linspace(0, 1, 9),
            byte_limits=[None],
        )  # fmt: skip
        plan, levels = AheadPlanner(base, config, CostModel(board)).plan(
            decided, occupancy, np.zeros((3, 9), np.float32), 0.0
        )
        without = base.plan(
            decided.utility, decided.tau, occupancy, decided.counts, decided.worth, decided.byte_limits
        )
        assert plan.load.tolist() == without.load.tolist()
        assert (plan.n_refused, len(plan.ahead)) == (0, 0)
        assert np.array_equal(levels, decided.utility)


def test_a_copy_costs_one_use_until_the_host_is_seen_to_rest() -> None:
    board = LocalBoard(BoardGeometry.uniform(n_layer=2, n_expert=4, n_expert_used=1, n_slots=4))
    cost = CostModel(board)
    assert cost.copy_prices() == 1.0
    cost.is_host_measured[:] = cost.is_device_measured[:] = True
    cost.load_us[:], cost.device_us[:] = 100.0, 20.0
    cost.step_us, cost.host_us = 1000.0, 400.0
    assert cost.copy_prices() == pytest.approx(
        0.4 / 0.8
    )  # free for 60 % of the step; a use saves 80 us of 100
    cost.host_us = 0.0
    assert cost.copy_prices() == MIN_COPY_PRICE
    cost.is_concurrent = False  # the device is the host
    assert cost.copy_prices() == 1.0


# ------------------------------------------------------------------------------- the scheduler as a whole


def board_of_tokens(n_slots: int = 6) -> LocalBoard:
    return LocalBoard(
        BoardGeometry.uniform(n_layer=N_LAYER, n_expert=N_EXPERT, n_expert_used=N_USED, n_slots=n_slots)
    )


def forward(board: LocalBoard, token: int, experts: list[int]) -> None:
    """One token that uses the same experts in every layer."""
    board.counts[:, experts] += np.uint32(1)
    board.counters["n_forward"] += np.uint64(1)
    board.record_routing(np.array([token], np.int32), np.full((1, N_LAYER, N_USED), experts, np.uint16))


def test_a_token_that_comes_again_brings_its_experts() -> None:
    board = board_of_tokens(n_slots=8)
    scheduler = Scheduler(board, SchedulerConfig(predict=("token",)))
    forward(board, 7, [4, 5])
    scheduler.step()
    for token, experts in ((1, [0, 1]), (2, [0, 2]), (3, [1, 2])) * 60:
        board.residency[:] = 0
        board.residency[:, :3] = R  # those in use; two slots are left
        forward(board, token, experts)
        scheduler.step()
    assert not board.utility[:, 4:].any()
    before = board.utility.copy()
    scheduler.look_ahead([99])  # never seen
    assert np.array_equal(board.utility, before)
    scheduler.look_ahead([7])
    load = board.load[: int(board.n_load[0])].tolist()
    assert len(load) == 2
    assert set(load) < {4, 5, N_EXPERT + 4, N_EXPERT + 5}
    assert scheduler.foresight is not None
    stats = scheduler.foresight.stats
    assert stats.n_planned == 2
    for key in load:
        board.residency.reshape(-1)[key] = R
    forward(board, 7, [4, 5])
    scheduler.step()
    assert (stats.n_copied, stats.n_copies_used) == (2, 2)
    assert scheduler.foresight.predictor.score.recall is not None


def test_a_copy_that_leaves_unused_is_counted() -> None:
    board = board_of_tokens()
    scheduler = Scheduler(board, SchedulerConfig(predict=("token",)))
    forward(board, 7, [4, 5])
    scheduler.step()
    board.residency[:] = A
    scheduler.look_ahead([7])
    assert scheduler.foresight is not None
    stats = scheduler.foresight.stats
    board.residency[:, 4] = R
    forward(board, 7, [0, 1])
    scheduler.step()
    assert stats.n_copied == stats.n_planned // 2
    board.residency[:, 4] = A
    forward(board, 8, [4, 5])
    scheduler.step()
    assert stats.n_copies_used == 0


def test_without_predictors_nothing_is_different() -> None:
    """Bit for bit, whoever tells it of tokens."""
    boards = []
    for looks in (False, True):
        engine, scheduler = make()
        assert scheduler.foresight is None
        if looks:
            step = scheduler.step

            def step_and_look(scheduler: Scheduler = scheduler, step: object = step) -> PrefetchPlan:
                plan = step()  # type: ignore[operator]
                scheduler.look_ahead([1, 2, 3])
                return plan

            scheduler.step = step_and_look  # type: ignore[method-assign]
        run(engine, scheduler, Router(), 20)
        boards.append(scheduler.board)
    for name in ("utility", "tau", "load", "n_load", "byte_budget", "residency"):
        assert np.array_equal(getattr(boards[0], name), getattr(boards[1], name)), name


# --------------------------------------------------------------------------------------------- settings


def test_names_of_predictors() -> None:
    assert parse_predictors("none") == parse_predictors("") == ()
    assert parse_predictors(" token , token") == ("token",)
    assert SchedulerConfig(predict=["token"]).predict == ("token",)  # type: ignore[arg-type]
    for wrong in ("tokens", "token,none", "token,gate"):
        with pytest.raises(ConfigError, match="token"):
            parse_predictors(wrong)
    with pytest.raises(ConfigError, match="leave out one"):
        SchedulerConfig(predict=("token",), without=frozenset({"prefetch"}))
