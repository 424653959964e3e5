"""The measured fallback, on machines with a simulated clock: what is chosen, and what finding out costs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from fake_engine import FakeEngine

from pyspac.engine.board import BoardGeometry, LocalBoard
from pyspac.engine.step import StepRecord
from pyspac.scheduler.config import SchedulerConfig
from pyspac.scheduler.fallback import CHANGED, N_TRY, WAIT, Fallback
from pyspac.scheduler.paired_timing import Sample, compare
from pyspac.scheduler.scheduler import Scheduler

Cost = Callable[[int], float]  # of the step's number: a share of the step's time


@dataclass
class Machine:
    """Steps of `step_us`; copies cost `copying` of it, and a frozen set loses `stale` of it with time."""

    copying: Cost
    stale: Cost
    step_us: float = 10_000.0
    noise: float = 0.1  # standard deviation of a step
    n_stale: float = 30.0  # steps until a set is out of date
    accidents: float = 0.0  # chance of a step that takes ten times as long
    draft: bool = False
    fallback: Fallback = field(default_factory=Fallback)
    seed: int = 0

    def run(self, n_steps: int) -> None:
        rng = np.random.default_rng(self.seed)
        age = 0.0  # of the resident set: 0 up to date, 1 out of date
        self.us, self.ways = np.zeros(n_steps), np.zeros(n_steps, bool)
        self.if_copying, self.if_frozen = np.zeros(n_steps), np.zeros(n_steps)
        for i in range(n_steps):
            is_frozen = self.fallback.way == "frozen"
            age += ((1.0 if is_frozen else 0.0) - age) / self.n_stale
            luck = math.exp(self.noise * rng.standard_normal()) * (
                10.0 if rng.random() < self.accidents else 1
            )
            n_draft = int(rng.integers(0, 4)) if self.draft else 0
            us = self.step_us * (1.0 + 0.3 * n_draft) * luck
            self.if_copying[i] = us * (1.0 + self.copying(i))
            self.if_frozen[i] = us * (1.0 + self.stale(i))
            self.us[i] = us * (1.0 + age * self.stale(i) + (0.0 if is_frozen else self.copying(i)))
            self.ways[i] = is_frozen
            step = StepRecord(step=i, n_draft=n_draft, verify_us=self.us[i])
            self.fallback.observe([step], n_forward=1, loaded_bytes=0 if is_frozen else 1000, is_full=i >= 20)

    def loss(self) -> float:
        """Against the better of the two ways, held all the time."""
        return float(self.us.sum() / min(self.if_copying.sum(), self.if_frozen.sum())) - 1.0


def constant(share: float) -> Cost:
    return lambda _: share


SPEEDS = pytest.mark.parametrize("step_us", [1_000.0, 100_000.0])
SEEDS = pytest.mark.parametrize("seed", range(5))


@SEEDS
@SPEEDS
def test_where_copies_hurt_they_end(step_us: float, seed: int) -> None:
    machine = Machine(constant(0.10), constant(0.0), step_us, seed=seed)
    machine.run(4000)
    assert machine.fallback.chosen == "frozen"
    assert machine.fallback.gain == pytest.approx(0.10, abs=0.04)
    assert machine.loss() < 0.03
    assert machine.ways[1000:].mean() > 0.85


@SEEDS
@SPEEDS
def test_where_copies_help_they_go_on(step_us: float, seed: int) -> None:
    machine = Machine(constant(0.02), constant(0.30), step_us, seed=seed)
    machine.run(4000)
    assert machine.fallback.chosen == "copies"
    assert machine.fallback.n_trials >= 2
    assert machine.fallback.gain is not None
    assert machine.fallback.gain > 0.05
    assert machine.loss() < 0.02
    assert machine.ways.mean() < 0.06


@SEEDS
def test_a_machine_that_changes_is_followed(seed: int) -> None:
    """Another program takes the memory bus: copies begin to hurt; later it goes, and the text moves on."""
    machine = Machine(
        lambda i: 0.25 if 2000 <= i < 5000 else 0.01, lambda i: 0.0 if 2000 <= i < 5000 else 0.30, seed=seed
    )
    machine.run(8000)
    assert machine.ways[:2000].mean() < 0.1
    assert machine.ways[2600:5000].mean() > 0.85
    assert machine.ways[5700:].mean() < 0.1
    parts = [slice(0, 2000), slice(2000, 5000), slice(5000, 8000)]
    best = sum(min(machine.if_copying[p].sum(), machine.if_frozen[p].sum()) for p in parts)
    assert machine.us.sum() < 1.06 * best


@SEEDS
def test_drafts_and_accidents_are_no_difference(seed: int) -> None:
    machine = Machine(constant(0.10), constant(0.0), draft=True, accidents=0.02, seed=seed)
    machine.run(4000)
    assert machine.fallback.chosen == "frozen"
    alike = Machine(constant(0.0), constant(0.0), draft=True, accidents=0.02, seed=seed)
    alike.run(4000)
    assert alike.fallback.gain is not None
    assert abs(alike.fallback.gain) < 0.08
    assert alike.loss() < 0.01


@SEEDS
def test_a_disaster_is_ended_at_once(seed: int) -> None:
    """Without copies every step takes thrice as long: the ledger pays for a few."""
    machine = Machine(constant(0.0), constant(2.0), n_stale=1.0, seed=seed)
    machine.run(1000)
    assert machine.fallback.chosen == "copies"
    assert 0 < machine.ways.sum() < 20
    assert machine.loss() < 0.03


@SEEDS
def test_under_much_noise_several_trials_decide(seed: int) -> None:
    """50 % per step: a round's doubt is as large as what is to be found."""
    hurt = Machine(constant(0.10), constant(0.0), noise=0.5, seed=seed)
    help_ = Machine(constant(0.02), constant(0.30), noise=0.5, seed=seed)
    for machine, chosen in ((hurt, "frozen"), (help_, "copies")):
        machine.run(8000)
        assert machine.fallback.chosen == chosen
        assert machine.loss() < 0.05


def test_nothing_is_tried_without_copies_or_before_the_device_is_full() -> None:
    for loaded_bytes, is_full in ((0, True), (1000, False)):
        fallback = Fallback()
        for i in range(2000):
            step = StepRecord(step=i, verify_us=1000.0)
            fallback.observe([step], n_forward=1, loaded_bytes=loaded_bytes, is_full=is_full)
        assert fallback.n_trials == 0
        assert fallback.way != "frozen"
        assert fallback.to_dict()["gain"] is None


def test_the_sequences_of_a_batch_are_one_step() -> None:
    fallback, n_passes = Fallback(), 0
    while fallback.way != "frozen":
        steps = [StepRecord(server_slot=slot, n_tokens=4, verify_us=1000.0) for slot in range(4)]
        fallback.observe(steps, n_forward=1, loaded_bytes=1000, is_full=True)
        n_passes += 1
    assert n_passes == WAIT[0]


def test_what_was_found_before_is_taken_up_once_the_device_is_full() -> None:
    fallback = Fallback()
    fallback.remember("frozen", 0.07)
    for i in range(WAIT[0] + N_TRY):
        assert fallback.way != "frozen" or i >= WAIT[0]
        fallback.observe(
            [StepRecord(step=i, verify_us=1e4)], n_forward=1, loaded_bytes=1000, is_full=i >= N_TRY
        )
    assert fallback.way == "frozen"
    assert fallback.to_dict() == {"chosen": "frozen", "gain": 0.07, "n_trials": 0, "n_switches": 0}


@dataclass
class SeveralWays:
    """Steps that take so much longer in each way; layers become whole, and split again, in `n_move` steps."""

    extra: dict[str, float]
    n_move: int = 20
    can_be_whole: bool = True
    fallback: Fallback = field(default_factory=Fallback)

    def run(self, n_steps: int, seed: int) -> None:
        rng, n_moved = np.random.default_rng(seed), 0
        self.ways, self.us = [], np.zeros(n_steps)
        for i in range(n_steps):
            way = self.fallback.way
            n_moved = min(max(n_moved + (1 if way == "whole" else -1), 0), self.n_move)
            is_moving = 0 < n_moved < self.n_move
            self.us[i] = (
                1e4 * (1.0 + self.extra[way] + 0.3 * is_moving) * math.exp(0.1 * rng.standard_normal())
            )
            self.ways.append(way)
            self.fallback.observe(
                [StepRecord(step=i, verify_us=self.us[i])],
                n_forward=1,
                loaded_bytes=1000 if way == "copies" else 0,
                is_full=i >= 20,
                can_be_whole=self.can_be_whole,
                has_whole="split" in self.extra,
                is_in_place=n_moved == (self.n_move if way == "whole" else 0),
            )

    def loss(self) -> float:
        return float(self.us.mean() / (1e4 * (1.0 + min(self.extra.values())))) - 1.0


@SEEDS
@pytest.mark.parametrize("best", ["copies", "frozen", "whole", "split"])
def test_the_fastest_of_four_is_found(best: str, seed: int) -> None:
    extra = {"copies": 0.10, "frozen": 0.12, "whole": 0.11, "split": 0.11} | {best: 0.0}
    machine = SeveralWays(extra)
    machine.run(8000, seed)
    assert machine.fallback.chosen == best
    assert machine.fallback.gain == pytest.approx(0.10, abs=0.04)
    assert machine.ways[-2000:].count(best) > 1700
    assert machine.loss() < 0.07  # three others are tried, one after the other


@SEEDS
def test_whole_layers_alone_that_are_slow_cost_little(seed: int) -> None:
    """A device's worth of experts is copied to see it, and back: the ledger ends that."""
    machine = SeveralWays({"copies": 0.0, "frozen": 0.2, "whole": 0.5}, n_move=100)
    machine.run(4000, seed)
    assert machine.fallback.chosen == "copies"
    assert machine.loss() < 0.03


def test_whole_layers_alone_are_tried_where_they_can_be() -> None:
    machine = SeveralWays({"copies": 0.1, "frozen": 0.2, "whole": 0.0}, can_be_whole=False)
    machine.run(3000, 0)
    assert "whole" not in machine.ways
    remembering = SeveralWays({"copies": 0.1, "frozen": 0.2, "whole": 0.0}, can_be_whole=False)
    remembering.fallback.remember("whole", 0.1)
    remembering.run(1000, 0)
    assert remembering.fallback.chosen == "copies"
    remembering.can_be_whole = True
    remembering.run(1000, 0)
    assert remembering.fallback.to_dict()["chosen"] == "whole"
    remembering.can_be_whole = False  # the engine gave up
    remembering.run(10, 0)
    assert remembering.fallback.way == "copies"


def test_compare_takes_steps_of_a_kind() -> None:
    slow = [Sample((1, 0), 110.0)] * 8 + [Sample((5, 4), 220.0)] * 2
    fast = [Sample((1, 0), 100.0)] * 8 + [Sample((3, 2), 50.0)] * 8
    ratio = compare(slow, fast)
    assert ratio is not None
    assert ratio.log == pytest.approx(math.log(1.1))
    assert ratio.is_above(CHANGED, 2.0)
    assert compare(slow, [Sample((7, 6), 1.0)] * 8) is None


@pytest.mark.parametrize(
    "asked",
    [
        {"without": {"fallback"}},
        {"without": {"evict"}},
        {"predict": ("token",)},
        {"threshold": 3},
        {"byte_budget": 1},
    ],
)
def test_what_was_asked_for_is_not_overruled(asked: dict[str, object]) -> None:
    board = LocalBoard(BoardGeometry.uniform(n_layer=2, n_expert=8, n_expert_used=2, n_slots=4))
    assert Scheduler(board, SchedulerConfig(**asked)).fallback is None  # type: ignore[arg-type]
    for others in ({"sd"}, {"whole"}):
        assert Scheduler(board, SchedulerConfig(without=frozenset(others))).fallback is not None


def test_a_scheduler_without_copies_asks_for_none() -> None:
    """Copies that take their time on a step's clock: the scheduler ends them, and says so on the board."""
    board = LocalBoard(BoardGeometry.uniform(n_layer=2, n_expert=32, n_expert_used=4, n_slots=16))
    engine, scheduler = FakeEngine(board), Scheduler(board, SchedulerConfig(payback_steps=0))
    rng, n_before = np.random.default_rng(0), 0
    for _ in range(1500):
        counts = np.zeros((2, 32), np.uint32)
        for row in counts:
            row[rng.choice(32, 4, replace=False)] = 1  # no expert is better than another
        engine.forward(counts)
        n_loads, n_before = engine.counter("n_loads") - n_before, engine.counter("n_loads")
        board.record_step(StepRecord(verify_us=1000 + 300 * n_loads))
        scheduler.step()
    assert scheduler.fallback is not None
    assert scheduler.fallback.chosen == "frozen"
    if scheduler.fallback.way == "frozen":
        assert board.byte_budget[0] == 0
        assert board.n_load[0] == 0
