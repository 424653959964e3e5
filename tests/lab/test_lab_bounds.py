"""What must hold for every trace: books balance, Belady bounds demand-only policies, unbounded bounds all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import MIB, make_trace

from pyspac.lab.cache import divide_slots
from pyspac.lab.combos import COMBINATIONS, find_setup
from pyspac.lab.machine import PRESETS
from pyspac.lab.registry import names
from pyspac.lab.setup import Setup, capacity_bytes
from pyspac.lab.simulator import Run, simulate
from pyspac.lab.trace import Trace, TraceGeometry
from pyspac.lab.workload import make_workload

DEMAND_ONLY = [
    name for name in names("eviction") if name not in ("unbounded", "static", "static-profile", "belady")
]
LOSSY = ("specmd-2", "specmd-4")
NEEDS_SCORES = ("specmd-2", "specmd-5")


def random_trace(seed: int, n_token: int = 24, n_layer: int = 3, n_used: int = 2) -> Trace:
    """Zipf-like routing with some memory of the last token; two layout groups."""
    rng = np.random.default_rng(seed)
    share = 1 / np.arange(1, 9)
    tokens = [
        [list(rng.choice(8, n_used, replace=False, p=share / share.sum())) for _ in range(n_layer)]
        for _ in range(n_token)
    ]
    return make_trace(tokens)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), n_slots=st.integers(1, 20), k=st.integers(0, 3),
       policy=st.sampled_from(DEMAND_ONLY), miss=st.sampled_from(["fetch", "host-admit"]))  # fmt: skip
def test_belady_misses_least_of_all_demand_only_policies(
    seed: int, n_slots: int, k: int, policy: str, miss: str
) -> None:
    workload = make_workload(random_trace(seed), k)
    machine = PRESETS["instant"]
    best = simulate(workload, Setup(eviction="belady", capacity=str(n_slots)), machine)
    other = simulate(
        workload, Setup(eviction=policy, prefetch="none", miss=miss, capacity=str(n_slots)), machine
    )
    assert best["misses"] <= other["misses"]
    assert best["accesses"] == other["accesses"]


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10_000), n_slots=st.integers(1, 20), k=st.integers(0, 3),
    name=st.sampled_from([name for name in COMBINATIONS if name != "specmd-4"]),
    machine=st.sampled_from(sorted(PRESETS)),
)  # fmt: skip
def test_books_balance_and_unbounded_bounds_all(
    seed: int, n_slots: int, k: int, name: str, machine: str
) -> None:
    setup, forced_k = find_setup(name, Setup(capacity=str(n_slots)))
    trace = random_trace(seed)
    if name in NEEDS_SCORES:
        scores = np.random.default_rng(seed).normal(size=(trace.n_token, 3, 8)).astype(np.float16)
        trace = replace(trace, early_logits=scores[None])
    workload = make_workload(trace, k if forced_k is None else forced_k)
    row = simulate(workload, setup, PRESETS[machine])  # checks its books
    assert row["hits"] + row["misses"] == row["accesses"]
    assert row["bytes_moved"] <= row["loads"] * MIB
    bound = simulate(workload, Setup(eviction="unbounded"), PRESETS[machine])
    assert bound["misses"] == 0
    assert bound["coverage"] == 1.0
    if name not in LOSSY and PRESETS[machine].device_gb_s > 2 * PRESETS[machine].host_gb_s:
        assert bound["predicted_tps"] >= row["predicted_tps"] * 0.999


def test_a_run_repeats() -> None:
    workload = make_workload(random_trace(1), 2)
    setup, _ = find_setup("specmd-1", Setup(capacity="6"))
    assert simulate(workload, setup, PRESETS["rtx4090"]) == simulate(workload, setup, PRESETS["rtx4090"])


def geometry(expert_bytes: tuple[int, ...], group: tuple[int, ...]) -> TraceGeometry:
    return TraceGeometry(
        model="m", architecture="a", n_layer=len(expert_bytes), n_expert=8, n_expert_used=2,
        expert_bytes=expert_bytes, dense_bytes=(0,) * len(expert_bytes), group=group,
    )  # fmt: skip


def test_slots_are_divided_as_in_the_engine() -> None:
    # a group of 16 experts of 10 and one of 8 of 20 bytes: 320 in all. 100 bytes are 31 %: 5 and 2 slots use
    # 90, and the 10 bytes left over buy one more of the first group
    g = geometry((10, 10, 20), (0, 0, 1))
    assert divide_slots(100, g) == [6, 2]
    assert divide_slots(10**6, g) == [16, 8]


def test_dense_layers_have_no_slots() -> None:
    assert divide_slots(10**6, geometry((0, 10), (0, 0))) == [8]


@pytest.mark.parametrize(("text", "expected"), [("5%", 500), ("100%", 10_000), ("0.005", 5242)])
def test_capacity(text: str, expected: int) -> None:
    assert capacity_bytes(text, 10_000) == expected


def test_emulated_drafts_advance_by_what_is_accepted() -> None:
    # every draft accepted: 3 tokens per step; none accepted: 1 token per step, three verified
    trace = random_trace(0, n_token=9)
    everything = make_workload(trace, 2, accept=1.0)
    assert [step.n_emitted for step in everything.steps] == [3, 3, 3]
    nothing = make_workload(trace, 2, accept=0.0)
    assert [len(step.tokens) for step in nothing.steps] == [3] * 7 + [2, 1]
    assert nothing.n_emitted == everything.n_emitted == 9


def test_demand_folds_tokens() -> None:
    # tokens 0 and 1 share expert 3: rows 2; order of appearance 3, 1, 5; best rank of 3 is 0
    trace = make_trace([[[3, 1]], [[5, 3]]])
    demand = make_workload(trace, 1, accept=1.0).steps[0].layers[0]
    assert demand.keys.tolist() == [3, 1, 5]
    assert demand.rows.tolist() == [2, 1, 1]
    assert demand.rank.tolist() == [0, 1, 0]
    assert demand.weight.tolist() == pytest.approx([1.0, 0.5, 0.5])


def test_the_prompt_may_be_the_first_step() -> None:
    status = np.array([0, 0, 1, 1], np.uint8)
    trace = make_trace([[[0]], [[1]], [[0]], [[1]]], status=status)
    decode = Run(make_workload(trace, 0), Setup(eviction="lru", capacity="4"), PRESETS["rtx4090"])
    every = Run(make_workload(trace, 0, phase="all"), Setup(eviction="lru", capacity="4"), PRESETS["rtx4090"])
    assert (decode.run().misses, every.run().misses) == (2, 2)
    assert every.books.hits == 2
    assert every.books.ttft_us > 0
    assert decode.books.ttft_us > 0
