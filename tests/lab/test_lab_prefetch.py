"""Prefetch policies, their predictors and the cutoff layer, on cases worked by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tiny import MIB, make_trace, observe, one_layer

from pyspac.errors import ConfigError
from pyspac.lab.combos import find_setup
from pyspac.lab.cutoff import cutoff_layer
from pyspac.lab.demand import Demand
from pyspac.lab.machine import PRESETS
from pyspac.lab.setup import Setup
from pyspac.lab.simulator import Run
from pyspac.lab.trace import Trace
from pyspac.lab.workload import make_workload

COPY_1MS = replace(
    PRESETS["rtx4090"],
    name="test",
    link_gb_s=MIB / 1e6,
    link_latency_us=0.0,
    layer_us=0.0,
    step_us=0.0,
    draft_us=2000.0,
    is_shared=False,
)  # fmt: skip  one expert takes 1 ms over the link; the device's work takes next to nothing


def early_trace(guess: list[list[int]], truth: list[list[list[int]]]) -> object:
    """A trace whose recorded early logits put `guess[layer]` first."""
    trace = make_trace(truth)
    early = np.zeros((trace.n_token, trace.geometry.n_layer, 8), np.float16)
    for il, experts in enumerate(guess):
        for rank, expert in enumerate(experts):
            early[:, il, expert] = 10 - rank
    return replace(trace, early_logits=early[None])


def test_next_layer_copies_the_recorded_guess_in_time() -> None:
    # layer 1 wants 3, the guess says 3: a hit; with the guess 5 it is a miss and a useless copy
    right = early_trace([[0], [3]], [[[0], [3]]])
    wrong = early_trace([[0], [5]], [[[0], [3]]])
    assert observe(right, 4, eviction="lru", prefetch="next-layer").books.hits == 1  # type: ignore[arg-type]
    run = observe(wrong, 4, eviction="lru", prefetch="next-layer")  # type: ignore[arg-type]
    assert (run.books.hits, run.books.loads) == (0, 3)
    assert run.policies.prefetch.predictor.source == "recorded"  # type: ignore[union-attr]


def test_overfetch_copies_more() -> None:
    trace = early_trace([[0], [5, 3]], [[[0], [3]]])
    run = observe(trace, 4, eviction="lru", prefetch="next-layer:overfetch=2")  # type: ignore[arg-type]
    assert (run.books.hits, run.books.loads) == (1, 3)


def test_score_copies_what_is_above_the_percentile() -> None:
    # scores 10 and 9 stand out of eight: above the 70th percentile are these two
    trace = early_trace([[0], [5, 3]], [[[0], [3]]])
    run = observe(trace, 4, eviction="lru", prefetch="score:percentile=70")  # type: ignore[arg-type]
    assert (run.books.hits, run.books.loads) == (1, 3)


def test_score_does_without_made_up_scores() -> None:
    # 26 of 128 experts whatever the token would be no scores: refused
    with pytest.raises(ConfigError, match="--early"):
        observe(make_trace([[[0], [3]]]), 4, eviction="lru", prefetch="score")


@pytest.mark.parametrize(("knob", "said"), [("", "assumed 0.6"), (":accuracy=0.889", "assumed 0.889")])
def test_the_draft_gate_is_assumed_where_nothing_of_the_draft_was_recorded(knob: str, said: str) -> None:
    # the recorded guesses are the previous layer's, not the draft's
    trace = early_trace([[0], [3]], [[[0], [3]]])
    run = observe(trace, 4, eviction="lru", prefetch=f"draft-gate{knob}", predictor_accuracy=0.6)  # type: ignore[arg-type]
    assert run.policies.prefetch.predictor.source == said  # type: ignore[union-attr]


def gate_trace() -> Trace:
    """Two layers, three tokens that use expert 0; the draft's gates say 5, then 4 for all but token 2."""
    trace = make_trace([[[0], [0]]] * 3)
    gates = np.zeros((3, 2, 8), np.float16)
    gates[..., 5], gates[..., 4] = 10, 9
    gates[2] = np.nan
    return replace(trace, draft_logits=gates)


@pytest.mark.parametrize(
    ("knobs", "loads"),
    [
        # 2 tokens drafted in 2 ms each hide four copies. Both layers use 0 (2 copies); the gates say 5 for
        # each layer (2 more), and with two per token 4 as well (2 more); a cutoff of 1: only the first layer
        ("", 2 + 2),
        ("critical=2,cutoff=2", 2 + 4),
        ("critical=2,cutoff=1", 2 + 2),
        ("cutoff=0", 2),
        ("cutoff=99", 2 + 2),
    ],
)
def test_sp_moe_goes_by_the_recorded_gates_up_to_the_cutoff(knobs: str, loads: int) -> None:
    base = Setup(capacity="8", prefetch=f"draft-gate:{knobs}")
    setup, _ = find_setup("sp-moe", base)
    machine = replace(COPY_1MS, link_gb_s=1e9)
    run = Run(make_workload(gate_trace(), 2, accept=1.0), setup, machine)
    run.run()
    assert run.policies.prefetch.predictor.source == "recorded"  # type: ignore[union-attr]
    assert run.books.loads == loads


def test_a_token_without_a_recorded_gate_copies_nothing() -> None:
    trace = replace(gate_trace(), draft_logits=np.full((3, 2, 8), np.nan, np.float16))
    run = observe(trace, 8, k=2, eviction="lru", prefetch="draft-gate:cutoff=2")
    assert run.books.loads == 2


def test_what_is_said_beside_a_combination_counts() -> None:
    setup, _ = find_setup("sp-moe", Setup(prefetch="draft-gate:critical=1", miss="host"))
    assert (setup.eviction, setup.prefetch, setup.miss) == ("lru", "draft-gate:critical=1", "host")
    setup, _ = find_setup("specmd-4", Setup(routing="cache-aware:lambda=0.5"))
    assert (setup.prefetch, setup.miss, setup.routing) == ("none", "fetch", "cache-aware:lambda=0.5")


def test_a_copy_that_comes_late_is_a_miss_but_not_fetched_twice() -> None:
    # the link needs 1 ms for layer 1's expert, layer 1 asks at once: late, and the layer waits for that copy
    trace = early_trace([[0], [3]], [[[0], [3]]])
    run = observe(trace, 4, machine=COPY_1MS, eviction="lru", prefetch="next-layer")  # type: ignore[arg-type]
    assert (run.books.misses, run.books.late_loads, run.books.loads) == (2, 1, 2)
    assert run.state.now_us == pytest.approx(2000, rel=0.02)  # two copies, one after the other


def test_an_assumed_guess_is_as_good_as_it_says() -> None:
    rng = np.random.default_rng(0)
    trace = make_trace([[[int(e)] for e in rng.integers(0, 64, 2)] for _ in range(400)], n_expert=64)
    run = observe(trace, 64, eviction="lru", prefetch="next-layer", predictor_accuracy=0.75)
    assert run.policies.prefetch.predictor.source == "assumed 0.75"  # type: ignore[union-attr]
    predictor = run.policies.prefetch.predictor  # type: ignore[attr-defined]
    found = [trace.experts[t, 1, 0] + 64 in predictor.top(1, np.array([t]), 1) for t in range(400)]
    assert np.mean(found) == pytest.approx(0.75, abs=0.06)


def test_history_copies_the_most_used_of_the_next_layers() -> None:
    # token 1 and 2 find 0, and token 1 finds 5; 5 is guessed once more for token 2, which wants 6
    run = observe(
        make_trace([[[0], [5]], [[0], [5]], [[0], [6]]]), 8, eviction="lru", prefetch="history:depth=1"
    )
    assert run.books.loads == 3
    assert run.books.hits == 3


def test_foresight_has_everything_there_in_time() -> None:
    # a link without delay and room for all: copies that begin before the first layer are all in time
    run = observe(make_trace([[[0], [1]], [[2], [3]]]), 8, eviction="belady", prefetch="foresight")
    assert run.books.misses <= 1


def test_foresight_copies_only_what_is_used_before_its_victim() -> None:
    # one slot: a returns at once, so nothing may take its place before
    run = observe(make_trace([[[0]], [[0]], [[0]], [[1]]]), 1, eviction="belady", prefetch="foresight")
    assert run.books.hits == 4
    assert run.books.loads == 2


def test_draft_gate_uses_the_drafting_window() -> None:
    # 2 drafted tokens of 2 ms each hide four copies: two per layer, two layers; the guess is perfect
    tokens = [[[0], [0]], [[1], [1]], [[2], [2]]]
    run = observe(
        make_trace(tokens), 8, machine=COPY_1MS, k=2, eviction="lru", prefetch="draft-gate:accuracy=1"
    )
    assert run.policies.prefetch.cutoff == 2  # type: ignore[attr-defined]
    first = run.workload.steps[0]
    assert first.n_draft == 2
    assert run.books.hits >= 4 - 1  # the last copy ends as the window does


@pytest.mark.parametrize(
    ("n_draft", "expected"),
    [
        # 4 layers of 10 us, one expert of 20 us each; drafting ends at n_draft * 40
        (1, 1),  # L = 1: 10 + 20 <= 40; L = 2: l = 1 needs 10 + 40 > 40
        (2, 3),  # L = 3: l = 1 needs 10 + 60 <= 80; L = 4 needs 10 + 80
        (3, 4),  # L = 4: 10 + 80 <= 120
        (0, 0),
    ],
)
def test_cutoff_by_time(n_draft: int, expected: int) -> None:
    found = cutoff_layer(
        [1] * 4, layer_us=10, copy_us=20, n_draft=n_draft, n_layer_draft=4, n_experts_room=99
    )
    assert found == expected


def test_cutoff_by_room_and_by_compute() -> None:
    # room for 5 experts at 2 per layer: 2 layers
    assert cutoff_layer([2] * 4, layer_us=1, copy_us=1, n_draft=9, n_layer_draft=4, n_experts_room=5) == 2
    # copies are nearly free: the guess for layer 4 is ready at 40 and its copy ends at 41, after drafting
    assert cutoff_layer([1] * 4, layer_us=10, copy_us=1, n_draft=1, n_layer_draft=4, n_experts_room=99) == 3


def test_utility_plan_obeys_tau_and_payback() -> None:
    # expert 0 of layer 0 in every token: hot; the others once each. One slot: it is 0's after the first step
    tokens = [[[0]], [[0]], [[1]], [[0]], [[2]], [[0]], [[0]]]
    run = observe(make_trace(tokens), 1, eviction="ema:budget=0")
    assert run.books.evictions == 0
    assert run.books.loads == 1
    assert run.books.hits == 4


def test_a_decision_knows_better_than_the_batch_what_takes_a_free_slot_first() -> None:
    state = Run(make_workload(one_layer("abcd"), 0), Setup(capacity="4"), COPY_1MS).state
    keys = np.arange(4)
    demand = Demand(0, keys, np.array([4, 3, 2, 1]), np.ones(4), np.zeros(4, np.int64))
    state.link.fill(demand, demand.rows, 4, now=0.0)  # the first one begins
    state.link.reorder_fills(np.array([0, 1, 1, 2, 0, 0, 0, 0], np.uint8))
    arrived: list[set[int]] = []
    for ms in range(1, 5):
        state.link.advance(1e3 * ms)
        arrived.append(set(np.flatnonzero(state.cache.is_resident(keys)).tolist()))
    assert arrived == [{0}, {0, 3}, {0, 1, 3}, {0, 1, 2, 3}]


def test_the_run_lets_every_decision_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    monkeypatch.setattr("pyspac.lab.link.Link.reorder_fills", lambda link, utility: said.append(utility))
    run = observe(one_layer("abcd"), 4, eviction="ema")
    assert len(said) == len(run.workload.steps)


def test_what_is_used_meanwhile_goes_by_its_utility(monkeypatch: pytest.MonkeyPatch) -> None:
    levels: list[int] = []
    monkeypatch.setattr("pyspac.lab.link.Link.fill", lambda link, demand, found, *_: levels.extend(found))
    observe(one_layer("aaab"), 4, eviction="ema")
    assert levels[0] == levels[3] == 0  # never used before
    assert 0 < levels[1] <= levels[2]
