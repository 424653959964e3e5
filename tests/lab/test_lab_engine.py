"""The engine agrees with the lab: the same decisions give the same hits, misses, loads and evictions.

The engine runs in its deterministic mode: the device is the CPU, and every decision's copies are waited for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf_models
import numpy as np
import pytest

from pyspac.engine.board import NO_BUDGET, Residency
from pyspac.engine.engine import Engine
from pyspac.engine.params import EngineParams
from pyspac.generate.llama import Context, ContextParams, Model, ModelParams
from pyspac.lab.machine import PRESETS
from pyspac.lab.probe import RoutingProbe
from pyspac.lab.recorder import TracedContext
from pyspac.lab.setup import Setup
from pyspac.lab.simulator import Run
from pyspac.lab.trace import Trace
from pyspac.lab.trace_builder import build_trace, trace_geometry
from pyspac.lab.workload import make_workload
from pyspac.scheduler.config import SchedulerConfig
from pyspac.scheduler.scheduler import Scheduler

WIDTH, N_STEPS, WAIT_MS = 3, 24, 20_000
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


CONTEXT = ContextParams(n_ctx=256, n_outputs_max=WIDTH, n_threads=2)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    """A model with two layout groups, and the routing of 24 forward passes of 3 tokens."""
    path = write_model(tmp_path_factory.mktemp("model") / "qwen3moe.gguf")
    rng = np.random.default_rng(5)
    # few different tokens, so that some experts are worth keeping
    batches = [[int(t) for t in rng.choice([10, 20, 30, 40, 50, 60, 70, 80], WIDTH)] for _ in range(N_STEPS)]
    probe = RoutingProbe(wants_logits=False, wants_early=False)
    with open_model(path) as model, TracedContext(model, CONTEXT, probe) as context:
        for batch in batches:
            context.decode(batch, WIDTH)
        yield Recorded(path, batches, build_trace(trace_geometry(path), context.passes, n_prompt=0))


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


def replay_on_engine(recorded: Recorded, capacity: str, decide: Any, **params: Any) -> dict[str, int]:
    """Decode the same batches; `decide(engine, index)` runs between the steps."""
    with open_model(recorded.path) as model, Context(model, CONTEXT) as context:
        assert context.ptr is not None
        with Engine.attach(
            context.ptr, EngineParams(device="cpu", cache=capacity, fill=False, **params)
        ) as engine:
            for index, batch in enumerate(recorded.batches):
                context.decode(batch, WIDTH)
                engine.end_forward()
                decide(engine, index)
                engine.apply()
                engine.wait_idle(WAIT_MS)
                decide(engine, ~index)
            counters = engine.board.counters[0]
            return {name: int(counters[name]) for name in counters.dtype.names}


def assert_same_books(run: Run, counters: dict[str, int]) -> None:
    books = run.books
    assert counters["n_hit"] == books.hits
    assert counters["n_miss"] + counters["n_late"] == books.misses
    assert counters["n_late"] == books.late_loads == 0
    assert counters["n_loads"] == books.loads
    assert counters["n_evictions"] == books.evictions
    assert counters["loaded_bytes"] == books.bytes_moved
    assert counters["n_hit_rows"] == books.covered_activations
    assert counters["n_hit_rows"] + counters["n_miss_rows"] == books.activations
    assert counters["n_pinned_steals"] == 0


@pytest.mark.parametrize(
    ("estimator", "capacity"), [("ema", "12%"), ("spac", "50%"), ("last", "12%"), ("utility-lru", "30%")]
)
def test_engine_replays_the_labs_decisions(recorded: Recorded, estimator: str, capacity: str) -> None:
    setup = Setup(
        eviction=f"{estimator}:budget=0,payback_steps=0", capacity=capacity, without=frozenset({"prompt"})
    )
    run, steps = lab_run(recorded.trace, setup)
    assert run.books.evictions > 0, "the case must exercise eviction"

    def decide(engine: Engine, index: int) -> None:
        board = engine.board
        if index < 0:  # after the copies
            assert np.array_equal(board.residency.ravel(), steps[~index]["residency"]), f"step {~index}"
            return
        with board.decision():
            for name in ("utility", "tau", "load", "n_load"):
                getattr(board, name)[:] = steps[index][name]
            board.byte_budget[0] = NO_BUDGET

    assert_same_books(run, replay_on_engine(recorded, capacity, decide))


@pytest.mark.parametrize("estimator", ["ema", "spac"])
def test_the_shipping_scheduler_decides_alike_on_board_and_lab(recorded: Recorded, estimator: str) -> None:
    setup = Setup(eviction=f"{estimator}:budget=0,threshold=1", capacity="25%", without=frozenset({"prompt"}))
    run, _ = lab_run(recorded.trace, setup)
    config = SchedulerConfig(estimator=estimator, n_draft_max=run.workload.k, byte_budget=None, threshold=1)
    with open_model(recorded.path) as model, Context(model, CONTEXT) as context:
        assert context.ptr is not None
        with Engine.attach(context.ptr, EngineParams(device="cpu", cache="25%", fill=False)) as engine:
            scheduler = Scheduler(engine.board, config)
            for batch in recorded.batches:
                context.decode(batch, WIDTH)
                engine.end_forward()
                scheduler.step()
                engine.apply()
                engine.wait_idle(WAIT_MS)
            counters = engine.board.counters[0]
            assert_same_books(run, {name: int(counters[name]) for name in counters.dtype.names})
            assert np.count_nonzero(engine.board.residency == Residency.RESIDENT) > 0
