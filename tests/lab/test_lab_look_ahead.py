"""Routers asked early, replayed: what is said is judged, copied in time, and kept until its layer has run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import MIB, make_trace

from pyspac.engine.ahead import NEXT_LAYERS
from pyspac.lab.machine import PRESETS, Machine
from pyspac.lab.setup import Setup
from pyspac.lab.simulator import Run
from pyspac.lab.trace import Trace, TraceError
from pyspac.lab.workload import make_workload

COPY_1MS = replace(
    PRESETS["rtx4090"],
    name="test",
    link_gb_s=MIB / 1e6,
    link_latency_us=0.0,
    layer_us=0.0,
    step_us=0.0,
    draft_us=10_000.0,
    is_shared=False,
)  # fmt: skip  one expert takes 1 ms over the link
N_LAYER, N_EXPERT = 5, 8


def alternating(n_token: int = 12) -> Trace:
    """Tokens that use expert 0 or 1 of each layer in turn, with guesses that are right."""
    tokens = [[[i % 2]] * N_LAYER for i in range(n_token)]
    truth = np.full((n_token, N_LAYER, N_EXPERT), 0.0, np.float16)
    for i in range(n_token):
        truth[i, :, i % 2] = 1.0
    early = np.stack([truth] * 3)
    for d in range(3):
        early[d, :, : d + 1] = np.nan  # no layer so far before them
    return make_trace(tokens, N_EXPERT, early_logits=early, draft_logits=truth)


def run(trace: Trace, machine: Machine, k: int = 0, capacity: str = "5", **fields: Any) -> Run:
    """Room for one expert of each layer, where estimators alone cannot tell which one comes."""
    setup = Setup(eviction="ema", capacity=capacity, without=frozenset({"prompt"}), **fields)
    found = Run(make_workload(trace, k), setup, machine)
    found.run()
    return found


@pytest.mark.parametrize(("depth", "name"), list(enumerate(NEXT_LAYERS, 1)))
def test_next_layer_is_judged_by_what_was_used(depth: int, name: str) -> None:
    [said] = run(alternating(), PRESETS["instant"], predict=(name,)).predictors()
    assert (said["recall"], said["precision"], said["source"]) == (1.0, 1.0, "recorded")
    assert said["n_predicted"] == 12 * (N_LAYER - depth)


def test_a_guess_that_is_wrong_is_no_hit() -> None:
    trace = alternating()
    assert trace.early_logits is not None
    wrong = replace(trace, early_logits=trace.early_logits[..., ::-1].copy())
    [said] = run(wrong, PRESETS["instant"], predict=("next-layer",)).predictors()
    assert (said["recall"], said["precision"], said["n_copies_used"]) == (0.0, 0.0, 0)


def test_what_is_said_in_time_is_copied_and_used() -> None:
    without, with_guess = (
        run(alternating(), PRESETS["instant"], predict=predict) for predict in ((), ("next-layer",))
    )
    [said] = with_guess.predictors()
    assert said["n_copied"] + said["n_dropped"] == said["n_queued"]  # dropped: all slots were wanted more
    assert said["n_copies_used"] == said["n_copied"] > 0
    assert with_guess.books.hits > without.books.hits


def test_what_would_come_too_late_is_left_alone() -> None:
    slow = replace(COPY_1MS, device_gb_s=1e6, host_gb_s=1e6, host_gflop_s=1e9, device_gflop_s=1e9)
    [said] = run(alternating(), slow, predict=("next-layer",)).predictors()
    assert said["n_refused"] > 0
    assert said["n_queued"] == 0  # a layer takes next to no time


def test_the_draft_gate_copies_while_drafting_up_to_the_cutoff() -> None:
    # two tokens of 10 ms are drafted; five layers of one expert, 1 ms each: all end before drafting does
    found = run(alternating(), COPY_1MS, k=2, predict=("draft-gate",))
    [said] = found.predictors()
    assert said["cutoff_layer"] == N_LAYER
    assert said["precision"] == 1.0
    assert said["n_copies_used"] > 0
    # with drafts of 0.5 ms nothing does: nothing is queued, and all is predicted
    [idle] = run(alternating(), replace(COPY_1MS, draft_us=250.0), k=2, predict=("draft-gate",)).predictors()
    assert (idle["cutoff_layer"], idle["n_queued"]) == (0, 0)
    assert idle["n_predicted"] == said["n_predicted"] > 0
    assert idle["n_refused"] > 0


def test_nothing_is_queued_beyond_the_cutoff_layer() -> None:
    machine = replace(COPY_1MS, draft_us=1800.0)  # 2 tokens: 3.6 ms, 0.36 ms per layer: 3 + 3 * 0.36 > 3.6
    found = Run(
        make_workload(alternating(), 2),
        Setup(eviction="ema", capacity="5", predict=("draft-gate",), without=frozenset({"prompt"})),
        machine,
    )
    asked: list[int] = []
    expect = found.state.link.expect

    def note(keys: Any, *args: Any) -> Any:
        n_queued, cut = expect(keys, *args)
        asked.extend((keys // N_EXPERT).tolist() if n_queued else [])
        return n_queued, cut

    found.state.link.expect = note  # type: ignore[method-assign]
    found.run()
    [said] = found.predictors()
    assert 0 < said["cutoff_layer"] < N_LAYER
    assert max(asked) == said["cutoff_layer"] - 1


def test_what_is_expected_keeps_its_slot_until_its_layer_has_run() -> None:
    found = run(alternating(), PRESETS["instant"], predict=("next-layer",))
    cache = found.state.cache
    assert not cache.is_expected.any()  # all layers have run
    cache.is_expected[cache.owner[0][cache.owner[0] >= 0]] = True
    absent = int(np.flatnonzero(cache.residency == 0)[0])
    cache.free[0].clear()
    assert not cache.claim(absent, is_ahead=True)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000), n_slots=st.integers(1, 30), k=st.integers(0, 3), is_cold=st.booleans(),
    machine=st.sampled_from(sorted(PRESETS)),
    predict=st.lists(
        st.sampled_from(["token", "next-layer", "next-layer-3", "draft-gate"]), unique=True
    ),
)  # fmt: skip
def test_books_balance_whoever_predicts(
    seed: int, n_slots: int, k: int, is_cold: bool, machine: str, predict: list[str]
) -> None:
    rng = np.random.default_rng(seed)
    n_token = 24
    tokens = [[list(rng.choice(N_EXPERT, 2, replace=False)) for _ in range(N_LAYER)] for _ in range(n_token)]
    trace = make_trace(
        tokens, N_EXPERT,
        status=np.array([0] * 6 + [1] * (n_token - 6), np.uint8),
        token_id=rng.integers(0, 5, n_token).astype(np.int32),
        early_logits=rng.normal(size=(3, n_token, N_LAYER, N_EXPERT)).astype(np.float16),
        draft_logits=rng.normal(size=(n_token, N_LAYER, N_EXPERT)).astype(np.float16),
    )  # fmt: skip
    setup = Setup(eviction="ema", capacity=str(n_slots), predict=tuple(predict), is_cold=is_cold)
    found = Run(make_workload(trace, k), setup, PRESETS[machine])
    found.run()  # checks its books
    cache = found.state.cache
    for group, owner in enumerate(cache.owner):
        held = owner[owner >= 0]
        assert len(set(held.tolist())) == len(held) == len(owner) - len(cache.free[group])
    assert {said["name"] for said in found.predictors()} == set(predict)


@pytest.mark.parametrize(
    ("predict", "said"),
    [
        ("token", "token ids"), ("next-layer", "early logits 1 layers ahead"), ("draft-gate", "--draft-gate"),
        ("next-layer-3", "early logits 3 layers ahead"),
    ],
)  # fmt: skip
def test_a_trace_without_the_columns_is_refused(predict: str, said: str) -> None:
    plain = replace(alternating(), early_logits=None, draft_logits=None)
    with pytest.raises(TraceError, match=said) as error:
        run(plain, PRESETS["instant"], predict=(predict,))
    assert error.value.exit_code == 2
