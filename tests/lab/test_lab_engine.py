"""The engine agrees with the lab: the same decisions give the same hits, misses, loads and evictions.

The engine runs in its deterministic mode: the device is the CPU, and every decision's copies are waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf_models
import numpy as np
import pytest
from recording import Recording

from pyspac.engine.board import NO_BUDGET
from pyspac.engine.engine import Engine
from pyspac.engine.params import EngineParams
from pyspac.forward.context import Context, ContextParams
from pyspac.forward.model import Model, ModelParams
from pyspac.lab.machine import PRESETS
from pyspac.lab.recorder import read_target
from pyspac.lab.setup import Setup
from pyspac.lab.simulator import Run
from pyspac.lab.trace import Trace
from pyspac.lab.trace_builder import build_trace, trace_geometry
from pyspac.lab.workload import make_workload
from pyspac.scheduler.config import SchedulerConfig
from pyspac.scheduler.cost_model import CostModel
from pyspac.scheduler.plan_ahead import AheadPlanner
from pyspac.scheduler.scheduler import Scheduler

WIDTH, N_STEPS, N_PROMPT, WAIT_MS = 3, 24, 40, 20_000
SHAPE = gguf_models.Shape(n_layer=4, n_expert=16, n_expert_used=2)


@dataclass
class Recorded:
    path: Path
    batches: list[list[int]]
    trace: Trace


def write_model(path: Path) -> Path:
    """A random qwen3moe of SHAPE whose layers have two layouts in turn."""
    known = gguf_models.ARCHITECTURES
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(known, "qwen3moe", replace(known["qwen3moe"], shape=SHAPE))
        return gguf_models.write_model(path, "qwen3moe", types=gguf_models.MIXED_TYPES[:2])


def open_model(path: Path) -> Model:
    return Model(ModelParams(path=path, use_extra_bufts=False))


CONTEXT = ContextParams(n_ctx=256, n_outputs_max=N_PROMPT, n_threads=1)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with two layout groups."""
    return write_model(tmp_path_factory.mktemp("model") / "qwen3moe.gguf")


def record(path: Path, n_prompt: int) -> Recorded:
    """The routing of a prompt, if there is one, and of 24 forward passes of 3 tokens."""
    rng = np.random.default_rng(5)
    # few different tokens, so that some experts are worth keeping
    widths = ([n_prompt] if n_prompt else []) + [WIDTH] * N_STEPS
    batches = [[int(t) for t in rng.choice([10, 20, 30, 40, 50, 60, 70, 80], width)] for width in widths]
    recording = Recording(path.with_suffix(".raw"))
    with open_model(path) as model, Context(model, CONTEXT) as context:
        assert recording.watch(context)
        for batch in batches:
            context.decode(batch, len(batch))
    passes = read_target(recording.passes())
    return Recorded(path, batches, build_trace(trace_geometry(path), passes, n_prompt))


@pytest.fixture(scope="module")
def recorded(path: Path) -> Recorded:
    return record(path, 0)


@pytest.fixture(scope="module")
def prompted(path: Path) -> Recorded:
    return record(path, N_PROMPT)


def lab_run(trace: Trace, setup: Setup) -> tuple[Run, list[dict[str, Any]]]:
    """Run the lab; return it with the decision and the residency after every step."""
    run = Run(make_workload(trace), setup, PRESETS["instant"])
    assert run.scheduler is not None
    board, apply = run.scheduler.board, run.scheduler.apply
    steps: list[dict[str, Any]] = []

    def apply_and_note(now_us: float) -> None:
        decision = {name: getattr(board, name).copy() for name in ("utility", "tau", "load", "n_load")}
        apply(now_us)
        steps.append(decision | {"residency": run.state.cache.residency.copy()})

    run.scheduler.apply = apply_and_note  # type: ignore[method-assign]
    run.run()
    return run, steps


Decide = Callable[[int], None]


def replay_on_engine(
    recorded: Recorded, capacity: str, begin: Callable[[Engine], Decide], **params: Any
) -> dict[str, int]:
    """Decode the same batches; `begin(engine)` gives what decides after each.

    It is called with the step's index, and once more with ~index when the copies are done.
    """
    with open_model(recorded.path) as model, Context(model, CONTEXT) as context:
        assert context.ptr is not None
        with Engine.attach(context.ptr, EngineParams(device="cpu", cache=capacity, **params)) as engine:
            decide = begin(engine)
            for index, batch in enumerate(recorded.batches):
                context.decode(batch, len(batch))
                engine.end_forward()
                engine.wait_idle(WAIT_MS)  # for what fills free slots
                decide(index)
                engine.apply()
                engine.wait_idle(WAIT_MS)
                decide(~index)
            counters = engine.board.counters[0]
            return {name: int(counters[name]) for name in counters.dtype.names}


def assert_same_books(run: Run, counters: dict[str, int]) -> None:
    """But for fetches that find no slot: the lab's device uses them once, the engine's host computes."""
    books = run.books
    assert counters["n_hit"] == books.hits
    assert counters["n_miss"] + counters["n_late"] == books.misses
    assert counters["n_late"] == books.late_loads == 0
    assert counters["n_loads"] == books.loads - books.bypassed
    assert counters["n_evictions"] == books.evictions
    assert counters["loaded_bytes"] == books.bytes_moved or books.bypassed
    assert counters["n_hit_rows"] == books.covered_activations
    assert counters["n_hit_rows"] + counters["n_miss_rows"] == books.activations
    assert counters["n_pinned_steals"] == 0


def replay_decisions(recorded: Recorded, setup: Setup, **params: Any) -> Run:
    """Run the lab and let the engine carry out its decisions; both must agree after every step."""
    run, steps = lab_run(recorded.trace, setup)
    assert len(steps) == len(recorded.batches)

    def begin(engine: Engine) -> Decide:
        board = engine.board

        def decide(index: int) -> None:
            if index < 0:  # after the copies
                assert np.array_equal(board.residency.ravel(), steps[~index]["residency"]), f"step {~index}"
                return
            with board.decision():
                for name in ("utility", "tau", "load", "n_load"):
                    getattr(board, name)[:] = steps[index][name]
                board.byte_budget[0] = NO_BUDGET

        return decide

    assert_same_books(run, replay_on_engine(recorded, setup.capacity, begin, **params))
    return run


@pytest.mark.parametrize(
    ("estimator", "capacity"), [("ema", "12%"), ("spac", "50%"), ("last", "12%"), ("utility-lru", "30%")]
)
def test_engine_replays_the_labs_decisions(recorded: Recorded, estimator: str, capacity: str) -> None:
    setup = Setup(
        eviction=f"{estimator}:budget=0,payback_steps=0", capacity=capacity, without=frozenset({"prompt"})
    )
    assert replay_decisions(recorded, setup, fill=False).books.evictions > 0, "the case needs evictions"


# nobody leaves: in which slot a fill lands depends on when the copies run, and so does who is the oldest
FILLS = {"without": frozenset({"evict"})}


@pytest.mark.parametrize(("estimator", "capacity"), [("ema", "30%"), ("spac", "30%"), ("ema", "80%")])
def test_prompts_fill_the_same_slots_in_lab_and_engine(
    prompted: Recorded, estimator: str, capacity: str
) -> None:
    setup = Setup(eviction=f"{estimator}:budget=0", capacity=capacity, **FILLS)
    run = replay_decisions(prompted, setup, evict=False)
    cold, _ = lab_run(prompted.trace, replace(setup, is_cold=True))
    assert run.books.covered_activations > cold.books.covered_activations


def decide_on_board(recorded: Recorded, setup: Setup, config: SchedulerConfig, **params: Any) -> None:
    """Let the scheduler decide on the engine's board, and compare its books with the lab's."""
    run, _ = lab_run(recorded.trace, setup)

    def begin(engine: Engine) -> Decide:
        scheduler = Scheduler(engine.board, replace(config, n_draft_max=run.workload.k, byte_budget=None))
        return lambda index: scheduler.step() if index >= 0 else None

    counters = replay_on_engine(recorded, setup.capacity, begin, **params)
    assert_same_books(run, counters)
    assert counters["n_loads"] > 0


@pytest.mark.parametrize("estimator", ["ema", "spac"])
def test_the_shipping_scheduler_decides_alike_on_board_and_lab(recorded: Recorded, estimator: str) -> None:
    setup = Setup(eviction=f"{estimator}:budget=0,threshold=1", capacity="25%", without=frozenset({"prompt"}))
    decide_on_board(recorded, setup, SchedulerConfig(estimator=estimator, threshold=1), fill=False)


@pytest.mark.parametrize("capacity", ["30%", "80%"])
def test_a_prompt_seeds_the_scheduler_alike_on_board_and_lab(prompted: Recorded, capacity: str) -> None:
    setup = Setup(eviction="ema:budget=0,threshold=1", capacity=capacity, **FILLS)
    decide_on_board(prompted, setup, SchedulerConfig(threshold=1, **FILLS), evict=False)


# who leaves, and when, is the engine's own doing: nobody decides meanwhile
EVICTIONS = (
    "lru", "lfu", "lhu", "score", "least-stale", "least-stale:cyclic=1", "farthest-layer",
    "farthest-layer:cyclic=1",
)  # fmt: skip


def replay_baseline(recorded: Recorded, capacity: str, baseline: str) -> dict[str, int]:
    return replay_on_engine(recorded, capacity, lambda _: lambda _: None, baseline=baseline)


@pytest.mark.parametrize("capacity", ["12%", "30%", "60%"])
@pytest.mark.parametrize("eviction", EVICTIONS)
def test_misses_are_fetched_as_in_the_lab(recorded: Recorded, eviction: str, capacity: str) -> None:
    setup = Setup(eviction=eviction, miss="fetch", capacity=capacity)
    run = Run(make_workload(recorded.trace), setup, PRESETS["instant"])
    run.run()
    assert (run.books.bypassed > 0) == (capacity == "12%"), "there each layer asks for nearly all slots"
    counters = replay_baseline(recorded, capacity, f"{eviction}+fetch")
    assert_same_books(run, counters)
    assert counters["n_evictions"] > 0


PER_LAYER = "+per-layer"


@pytest.mark.parametrize("capacity", ["22%", "30%", "60%"])  # 22 %: what rounding leaves over goes to some
@pytest.mark.parametrize("eviction", ["lru", "lfu", "farthest-layer"])
def test_slots_of_a_layers_own_are_those_of_the_lab(recorded: Recorded, eviction: str, capacity: str) -> None:
    setup = Setup(eviction=eviction, miss="fetch", capacity=capacity, per_layer=True)
    run = Run(make_workload(recorded.trace), setup, PRESETS["instant"])
    run.run()
    counters = replay_baseline(recorded, capacity, f"{eviction}+fetch{PER_LAYER}")
    assert_same_books(run, counters)
    assert counters["n_evictions"] > 0
    if eviction == "lru" and capacity == "30%":
        shared = replay_baseline(recorded, capacity, f"{eviction}+fetch")
        assert shared["n_hit"] != counters["n_hit"], "else the test would hold of shared slots"


def test_evictions_differ(recorded: Recorded) -> None:
    """Else the test above would hold for any order."""
    found = [replay_baseline(recorded, "30%", f"{eviction}+fetch")["n_hit"] for eviction in EVICTIONS]
    assert len(set(found)) >= len(EVICTIONS) - 2, found  # lhu is lfu where all copies are of full precision


@pytest.mark.parametrize("slots", ["", PER_LAYER])
@pytest.mark.parametrize("estimator", ["ema", "spac"])
def test_misses_are_fetched_beside_the_scheduler_as_in_the_lab(
    recorded: Recorded, estimator: str, slots: str
) -> None:
    setup = Setup(
        eviction=f"{estimator}:budget=0,threshold=1", miss="fetch", capacity="25%",
        without=frozenset({"prompt"}), per_layer=slots == PER_LAYER,
    )  # fmt: skip
    config = SchedulerConfig(estimator=estimator, threshold=1)
    decide_on_board(recorded, setup, config, baseline=f"{estimator}+fetch{slots}")


def test_what_is_predicted_is_copied_alike_on_board_and_lab(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    # times differ: what a copy costs is given, and none comes too late
    monkeypatch.setattr(CostModel, "copy_prices", lambda cost: np.array([0.25]))
    monkeypatch.setattr(AheadPlanner, "_too_late", lambda planner, wanted, *_: np.zeros(len(wanted), bool))
    config = SchedulerConfig(
        threshold=9, payback_steps=2.0, predict=("token",), byte_budget=None, n_draft_max=WIDTH - 1
    )
    setup = Setup(
        eviction="ema:budget=0,threshold=9,payback_steps=2",
        capacity="25%",
        without=frozenset({"prompt"}),
        predict=("token",),
    )
    run, _ = lab_run(recorded.trace, setup)

    def begin(engine: Engine) -> Decide:
        scheduler = Scheduler(engine.board, config)

        def look_ahead(tokens: list[int]) -> None:
            for n in (1, len(tokens)):
                scheduler.look_ahead(tokens[:n])
                engine.apply()
                engine.wait_idle(WAIT_MS)

        def decide(index: int) -> None:
            if index >= 0:
                scheduler.step()
            elif ~index + 1 < len(recorded.batches):
                look_ahead(recorded.batches[~index + 1])

        look_ahead(recorded.batches[0])
        return decide

    counters = replay_on_engine(recorded, setup.capacity, begin, fill=False)
    assert_same_books(run, counters)
    assert run.scheduler is not None
    [token] = run.scheduler.predictors()
    assert token["n_copies_used"] > 0, str(token)
    assert token["source"] == "recorded"
    without, _ = lab_run(recorded.trace, replace(setup, predict=()))
    assert run.books.covered_activations > without.books.covered_activations
