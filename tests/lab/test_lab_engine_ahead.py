"""The engine's own predictors say what the lab's say of the same tokens, step by step and expert by expert.

Both ask the same routers with the same inputs: logits are stock's to the last bit, so the probe that records
sees what the engine does, and the demo's routers are of F32, for which nothing is rounded. Left are the order
in which a row is summed up, 1e-6 of a logit, and the 16 bits in which a trace keeps logits. Where those make
the last expert that is chosen equal to the first that is not, either may be named: once per token and layer.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import gguf_models
import numpy as np
import pytest
from conftest import ROOT
from dense_drafts import write_dense_draft
from recording import Recording

from pyspac.engine.ahead import AHEAD_NAMES, DRAFT_GATE, NEXT_LAYERS
from pyspac.engine.board import Residency
from pyspac.engine.engine import Engine
from pyspac.engine.params import EngineParams
from pyspac.forward.context import Context, ContextParams
from pyspac.forward.model import Model, ModelParams
from pyspac.lab.machine import PRESETS
from pyspac.lab.recorder import read_target
from pyspac.lab.setup import Setup
from pyspac.lab.simulator import Run
from pyspac.lab.trace import Trace
from pyspac.lab.trace_builder import Pass, build_trace, trace_geometry
from pyspac.lab.workload import make_workload
from pyspac.model.draft_files import gate_layers
from pyspac.model.gguf_header import read_header
from pyspac.model.spec_types import DRAFT

TARGET = ROOT / "pyspac/models/demo-moe.gguf"
N_PROMPT, N_STEPS, WIDTH_MAX = 24, 16, 4
N_TRIES, WAIT_S = 200, 20.0  # a thread that gets no core asks too late: then the step is done again
N_RUNS = 10  # one that gets none copies too late what a layer needed
CONTEXT = ContextParams(n_ctx=256, n_outputs_max=WIDTH_MAX, n_threads=1)
Counts = tuple[int, int, int]  # n_predicted, n_chosen, n_hit
Steps = list[list[int]]


@pytest.fixture(scope="module")
def low_bit(bin_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo target in 4 bits: a draft model of the same width."""
    path = tmp_path_factory.mktemp("draft") / "draft.gguf"
    command = [bin_dir / "llama-quantize", "--allow-requantize", TARGET, path, "Q4_0"]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return path


class Decoding:
    """The same tokens in every context, whoever looks on: a prompt, then steps of which drafts are a part."""

    def __init__(
        self, stack: ExitStack, target: Path, draft: Path | None, recording: Recording | None = None
    ) -> None:
        """Open target and draft, and record them, the target first."""

        def opened(path: Path) -> Context:
            model = stack.enter_context(Model(ModelParams(path=path, use_extra_bufts=False)))
            context = stack.enter_context(Context(model, CONTEXT))
            assert recording is None or recording.watch(context)
            return context

        self.target = opened(target)
        self.draft = opened(draft) if draft is not None else None

    def prompt(self, tokens: list[int]) -> None:
        for context in self.contexts():
            context.decode(tokens, 1)

    def contexts(self) -> list[Any]:
        return [context for context in (self.draft, self.target) if context is not None]

    def step(
        self, text: list[int], step: list[int], before_verifying: Callable[[], None] = lambda: None
    ) -> None:
        """Draft and verify, behind `text`: a draft model takes what it has missed with the first token."""
        if self.draft is not None:
            self.draft.decode([*text[self.draft.n_past :], step[0]], 1)
            for token in step[1:-1]:
                self.draft.decode([token], 1)
        before_verifying()
        self.target.decode(step, len(step))


def make_steps(width: int) -> Steps:
    """Text, as the demo model's vocabulary has it: the prompt first."""
    with Model(ModelParams(path=TARGET)) as model:
        text = model.vocab.tokenize((ROOT / "docs/architecture.md").read_text(encoding="utf-8"))
    starts = range(N_PROMPT, N_PROMPT + N_STEPS * width, width)
    return [text[:N_PROMPT], *(text[i : i + width] for i in starts)]


def record(steps: Steps, target: Path, draft: Path | None, raw: Path) -> tuple[Trace, Trace]:
    """Return the trace of these steps, and the same with logits in 32 bits."""
    recording = Recording(raw, "draft-inputs" if draft else "inputs")
    with ExitStack() as stack:
        decoding = Decoding(stack, target, draft, recording)
        decoding.prompt(steps[0])
        for i, step in enumerate(steps[1:], 1):
            decoding.step(list(chain(*steps[:i])), step)
    gates = None if draft is None else gate_layers("", read_header(target), read_header(draft), DRAFT)
    passes = read_target(recording.passes(), wants_early=draft is None, gates=gates)
    trace = build_trace(trace_geometry(target), passes, N_PROMPT)
    if draft is None:
        return trace, replace(trace, early_logits=in_32_bits(trace.early_logits, passes, "early"))
    return trace, replace(trace, draft_logits=in_32_bits(trace.draft_logits, passes, "draft"))


def in_32_bits(logits: Any, passes: list[Pass], field: str) -> Any:
    """Lay out what the probe read, as build_trace does."""
    wide, end = np.full(logits.shape, np.nan, np.float32), 0
    for one in passes:
        end += one.n_token
        for il, layer in one.layers.items():
            wide[..., end - len(layer.experts) : end, il, :] = getattr(layer, field)
    return wide


def said_in_lab(trace: Trace, name: str) -> list[tuple[Counts, Any]]:
    """Replay; per step what was counted, and the experts [n_cell] that were named up to it."""
    run = Run(
        make_workload(trace), Setup(eviction="ema", capacity="100%", predict=(name,)), PRESETS["instant"]
    )
    [stats] = [predictor.stats for predictor in run.ahead]
    named, said = np.zeros(run.state.n_cell, bool), []
    expect, run_step = run.state.link.expect, run._run_step

    def note_expected(keys: Any, *args: Any) -> Any:
        named[keys] = True
        return expect(keys, *args)

    def note_step(*args: Any) -> None:
        before = counts_of(asdict(stats))
        run_step(*args)
        said.append((tuple(np.subtract(counts_of(asdict(stats)), before).tolist()), named.copy()))

    run.state.link.expect = note_expected  # type: ignore[method-assign]
    run._run_step = note_step  # type: ignore[method-assign]
    run.run()
    return said


def said_in_engine(
    steps: Steps, name: str, target: Path, draft: Path | None, n_chosen: list[int]
) -> list[tuple[Counts, Any]]:
    """Decode; per step what was counted, and the experts [n_cell] on the device: nothing else brings them.

    n_chosen: by the routers in each step; fewer are counted where something was said too late.
    """
    params = EngineParams(device="cpu", cache="100%", fill=False, next_layer=NEXT_LAYERS.get(name, 0))
    said = []
    with ExitStack() as stack:
        decoding = Decoding(stack, target, draft)
        engine = stack.enter_context(Engine.attach(decoding.target.ptr, params))
        if draft is not None:
            engine.watch_draft(decoding.draft.ptr)
        decoding.prompt(steps[0])
        for i, n in enumerate(n_chosen, 1):
            counts = step_until_in_time(decoding, engine, list(chain(*steps[:i])), steps[i], name, n)
            engine.wait_idle()
            said.append((counts, (engine.board.residency == Residency.RESIDENT).ravel()))
    return said


def step_until_in_time(
    decoding: Decoding, engine: Engine, text: list[int], step: list[int], name: str, n_chosen: int
) -> Counts:
    """Run a step until all that was said of it came before its layers ran."""
    row = engine.board.ahead[AHEAD_NAMES.index(DRAFT_GATE if name == DRAFT_GATE else "next-layer")]
    n_past = [context.n_past for context in decoding.contexts()]
    for _ in range(N_TRIES):
        n_inputs = int(row["n_inputs"]) + (len(step) - 1) * engine.board.n_layer
        before = counts_of(row)
        if name == DRAFT_GATE:
            decoding.step(text, step, partial(wait_for_inputs, row, n_inputs))
        else:
            decoding.step(text, step)
        engine.end_forward()
        n_predicted, n, n_hit = np.subtract(counts_of(row), before).tolist()
        if n == n_chosen:
            return n_predicted, n, n_hit
        for context, n_kept in zip(decoding.contexts(), n_past, strict=True):
            context.rollback(n_kept)
    pytest.fail(f"in {N_TRIES} tries the thread that asks routers was never in time")


def counts_of(row: Any) -> Counts:
    return int(row["n_predicted"]), int(row["n_chosen"]), int(row["n_hit"])


def wait_for_inputs(row: Any, n: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while int(row["n_inputs"]) < n:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def n_doubtful(trace: Trace, name: str) -> list[int]:
    """Return per step the (token, layer) whose last chosen expert and first other one are equal."""
    logits = trace.draft_logits if name == DRAFT_GATE else trace.early_logits[NEXT_LAYERS[name] - 1]
    n_used = trace.geometry.n_expert_used
    ranked = -np.sort(-logits, axis=2)
    is_doubtful = ranked[:, :, n_used - 1] == ranked[:, :, n_used]
    decoded = trace.step[trace.status != 0]
    return [int(is_doubtful[trace.step == step].sum()) for step in np.unique(decoded)]


def assert_alike(raw: Path, steps: Steps, name: str, target: Path, draft: Path | None = None) -> None:
    trace, wide = record(steps, target, draft, raw)
    of_lab = said_in_lab(wide, name)
    n_hit, n_chosen = (sum(counts[i] for counts, _ in of_lab) for i in (2, 1))
    assert n_hit > (0.4 if target == TARGET else 0.2) * n_chosen  # of a model that learned something more
    for _ in range(N_RUNS):
        of_engine = said_in_engine(steps, name, target, draft, [counts[1] for counts, _ in of_lab])
        n_resident = 0
        for i, ((lab, named), (engine, resident)) in enumerate(zip(of_lab, of_engine, strict=True)):
            assert lab == engine, f"step {i}"
            assert not (resident & ~named).any(), f"step {i}"
            n_resident += int(resident.sum())
        if n_resident > 0:
            break
    assert n_resident > 0, f"in {N_RUNS} runs the engine copied nothing that could be looked at"
    for (lab, _), (engine, _), n in zip(
        said_in_lab(trace, name), of_engine, n_doubtful(trace, name), strict=True
    ):
        assert np.abs(np.subtract(lab, engine)).max() <= n


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("name", NEXT_LAYERS)
def test_next_layer_says_the_same_in_lab_and_engine(tmp_path: Path, name: str, width: int) -> None:
    assert_alike(tmp_path / "raw", make_steps(width), name, TARGET)


@pytest.mark.parametrize("width", [2, WIDTH_MAX])
def test_draft_gate_says_the_same_in_lab_and_engine(tmp_path: Path, low_bit: Path, width: int) -> None:
    assert_alike(tmp_path / "raw", make_steps(width), DRAFT_GATE, TARGET, low_bit)


@pytest.mark.parametrize("n_layer", [6, 4])
def test_a_dense_draft_says_the_same_in_lab_and_engine(tmp_path: Path, n_layer: int) -> None:
    draft = write_dense_draft(tmp_path / "dense.gguf", n_layer)
    assert_alike(tmp_path / "raw", make_steps(WIDTH_MAX), DRAFT_GATE, TARGET, draft)


@pytest.mark.parametrize("name", ["next-layer", DRAFT_GATE])
def test_a_router_s_bias_counts_in_both(tmp_path: Path, name: str) -> None:
    path = gguf_models.write_model(tmp_path / "gpt-oss.gguf", "gpt-oss")
    rng = np.random.default_rng(3)
    steps = [rng.integers(3, 60, N_PROMPT if i == 0 else 2).tolist() for i in range(N_STEPS)]
    assert_alike(tmp_path / "raw", steps, name, path, path if name == DRAFT_GATE else None)
