"""One step: drain, estimate, balance, plan, submit; with a stand-in for the engine."""

from __future__ import annotations

import inspect
import itertools

import numpy as np
import pytest
from fake_engine import FakeEngine

from pyspac.engine.board import NO_BUDGET, BoardGeometry, LocalBoard, Residency
from pyspac.scheduler.config import ABLATIONS, ESTIMATORS, SchedulerConfig
from pyspac.scheduler.scheduler import Scheduler


def make(
    n_layer: int = 4, n_expert: int = 16, n_slots: int = 12, **config: object
) -> tuple[FakeEngine, Scheduler]:
    board = LocalBoard(
        BoardGeometry.uniform(
            n_layer=n_layer, n_expert=n_expert, n_expert_used=2, n_slots=n_slots, expert_bytes=1000
        )
    )
    settings = SchedulerConfig(**config)  # type: ignore[arg-type]
    return FakeEngine(board, evict="evict" not in settings.without), Scheduler(board, settings)


class Router:
    """Counts with known favourites: most tokens pick from `favourites` of each layer, the rest anything."""

    def __init__(self, n_layer: int = 4, n_expert: int = 16, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.shape = (n_layer, n_expert)
        self.favourites = [self.rng.permutation(n_expert)[:3] for _ in range(n_layer)]

    def counts(self, n_tokens: int = 5) -> np.ndarray:
        counts = np.zeros(self.shape, np.uint32)
        for il, favourites in enumerate(self.favourites):
            for _ in range(n_tokens):
                pool = favourites if self.rng.random() < 0.9 else np.arange(self.shape[1])
                counts[il, self.rng.choice(pool, 2, replace=False)] += 1
        return counts


def run(engine: FakeEngine, scheduler: Scheduler, router: Router, n_steps: int) -> None:
    for _ in range(n_steps):
        engine.forward(router.counts())
        scheduler.step()
    engine.apply()


def test_one_step_by_hand() -> None:
    # Two layers of four experts, top-2, two slots, one token: layer 0 picks {0, 3}, layer 1 picks {1, 2}.
    # ema, K = 16: the four have rate 1, level 16. Four hot experts do not fit two slots: tau = K = 16, and
    # the plan stops at the free slots: the first two in layer order, flat 0 and 3.
    engine, scheduler = make(n_layer=2, n_expert=4, n_slots=2)
    engine.forward(np.array([[1, 0, 0, 1], [0, 1, 1, 0]], np.uint32))
    plan = scheduler.step()
    board = scheduler.board
    assert plan.load.tolist() == [0, 3]
    assert board.utility.tolist() == [[16, 0, 0, 16], [0, 16, 16, 0]]
    assert board.load[: int(board.n_load[0])].tolist() == [0, 3]
    assert board.byte_budget[0] == NO_BUDGET  # no link measured yet
    engine.apply()
    assert board.residency.tolist() == [[3, 0, 0, 3], [0, 0, 0, 0]]


@pytest.mark.parametrize("estimator", ["ema", "lfu", "static"])
def test_favourites_become_resident(estimator: str) -> None:
    engine, scheduler = make(estimator=estimator)
    router = Router()
    run(engine, scheduler, router, 40)
    for il, favourites in enumerate(router.favourites):
        assert np.all(scheduler.board.residency[il, favourites] == Residency.RESIDENT)


def test_little_churn_when_nothing_changes() -> None:
    engine, scheduler = make()
    router = Router()
    run(engine, scheduler, router, 40)
    before = engine.counter("n_loads")
    run(engine, scheduler, router, 40)
    assert engine.counter("n_loads") - before <= 20  # half a copy per step


def test_a_change_of_phase_is_followed() -> None:
    engine, scheduler = make()
    run(engine, scheduler, Router(seed=1), 40)
    router = Router(seed=2)
    run(engine, scheduler, router, 40)
    for il, favourites in enumerate(router.favourites):
        assert np.all(scheduler.board.residency[il, favourites] == Residency.RESIDENT)


def test_a_prompt_seeds_the_first_decision() -> None:
    engine, scheduler = make()
    router = Router()
    scheduler.board.prompt_counts += router.counts(200)
    scheduler.step()
    engine.apply()
    for il, favourites in enumerate(router.favourites):
        assert np.all(scheduler.board.residency[il, favourites] == Residency.RESIDENT)


def test_without_prompt_a_prompt_teaches_nothing() -> None:
    _, scheduler = make(without="prompt")
    scheduler.board.prompt_counts += Router().counts(200)
    assert scheduler.step().n_load == 0
    assert not scheduler.board.utility.any()


def test_a_long_prompt_throws_out_nobody_who_is_in_use() -> None:
    engine, scheduler = make()
    router, other = Router(seed=1), Router(seed=2)
    run(engine, scheduler, router, 60)
    before = scheduler.board.residency.copy()
    assert np.count_nonzero(before == Residency.RESIDENT) == 12  # all slots
    for _ in range(3):
        scheduler.board.prompt_counts += other.counts(1000)
        run(engine, scheduler, router, 1)
        assert np.array_equal(scheduler.board.residency, before)
    run(engine, scheduler, other, 40)
    assert not np.array_equal(scheduler.board.residency, before)


def test_a_step_without_activations_keeps_the_utilities() -> None:
    engine, scheduler = make()
    run(engine, scheduler, Router(), 10)
    before = scheduler.board.utility.copy()
    scheduler.step()
    assert np.array_equal(scheduler.board.utility, before)


def test_budget_follows_link_and_step_time() -> None:
    engine, scheduler = make(budget_share=0.5)
    engine.link_us_per_byte = 0.1  # 100 us per expert
    run(engine, scheduler, Router(), 20)
    expected = 0.5 * scheduler.cost.step_us / 0.1
    assert scheduler.board.byte_budget[0] == pytest.approx(expected, abs=1)


@pytest.mark.parametrize(("setting", "on_board"), [(5000, 5000), (None, NO_BUDGET)])
def test_budget_can_be_set(setting: int | None, on_board: int) -> None:
    engine, scheduler = make(byte_budget=setting)
    run(engine, scheduler, Router(), 3)
    assert int(scheduler.board.byte_budget[0]) == on_board


def test_without_prefetch_the_allocation_is_fixed_after_one_step() -> None:
    engine, scheduler = make(without={"prefetch"})
    run(engine, scheduler, Router(), 5)
    before = scheduler.board.residency.copy()
    assert (before == Residency.RESIDENT).sum(axis=1).tolist() == [3, 3, 3, 3]  # twelve slots, dealt evenly
    run(engine, scheduler, Router(seed=9), 20)
    assert np.array_equal(scheduler.board.residency, before)
    assert engine.counter("n_evictions") == 0


def test_without_evict_nobody_leaves() -> None:
    engine, scheduler = make(without={"evict"})
    run(engine, scheduler, Router(), 10)
    before = scheduler.board.residency == Residency.RESIDENT
    run(engine, scheduler, Router(seed=5), 20)
    assert np.all(scheduler.board.residency[before] == Residency.RESIDENT)
    assert scheduler.last_plan.n_load == 0


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_set_of_ablations_runs(estimator: str) -> None:
    for n in range(len(ABLATIONS) + 1):
        for without in itertools.combinations(ABLATIONS, n):
            engine, scheduler = make(n_layer=2, n_slots=5, estimator=estimator, without=without)
            run(engine, scheduler, Router(n_layer=2), 3)
            assert np.count_nonzero(scheduler.board.residency) <= 5
            assert scheduler.board.tau.min() >= 1


def test_counts_that_wrap_are_no_trouble() -> None:
    engine, scheduler = make()
    engine.board.counts[:] = 2**32 - 3
    scheduler = Scheduler(engine.board)
    run(engine, scheduler, Router(), 3)
    assert scheduler.activity.n_tokens == 5


def test_draft_limits_are_not_its_affair() -> None:
    _, scheduler = make()
    scheduler.board.n_draft_max[5] = 3
    scheduler.step()
    assert scheduler.board.n_draft_max.tolist() == [-1] * 5 + [3] + [-1] * 58
    assert not inspect.signature(scheduler.step).parameters


def test_stats_count_steps_and_plans() -> None:
    engine, scheduler = make()
    run(engine, scheduler, Router(), 7)
    stats = scheduler.stats()
    assert stats.n_steps == 7
    assert stats.n_loads_planned == engine.counter("n_loads")
    assert 0 < stats.step_p50_us <= stats.step_p99_us
