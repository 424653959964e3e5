"""Miss and routing policies on cases worked by hand, and what lossy ones cost in router weight."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tiny import MIB, make_trace, observe

from pyspac.errors import ConfigError
from pyspac.lab.machine import PRESETS, Machine

SIMPLE = Machine(
    name="simple",
    link_gb_s=MIB / 1e6,
    host_gb_s=MIB / 2e5,
    device_gb_s=MIB / 1e4,
    host_gflop_s=1e9,
    device_gflop_s=1e9,
    link_latency_us=0,
    layer_us=0,
    host_layer_us=0,
    step_us=0,
    draft_us=0,
    is_shared=False,
)  # fmt: skip  one expert: 1000 us on the link, 200 on the host, 10 on the device; so is a layer's dense part


def test_fetch_waits_for_the_link() -> None:
    run = observe(make_trace([[[0, 1]]]), 4, machine=SIMPLE, eviction="lru", miss="fetch")
    assert run.now == pytest.approx(10 + 2000 + 10)  # dense, two copies, the second expert
    assert run.books.stall_us == pytest.approx(2000 - 10)
    assert run.books.bytes_moved == 2 * MIB


def test_host_computes_and_copies_nothing() -> None:
    run = observe(make_trace([[[0, 1]]]), 4, machine=SIMPLE, eviction="lru", miss="host")
    assert run.now == pytest.approx(10 + 400)
    assert run.books.loads == 0


def test_copies_slow_the_host_down() -> None:
    # the host reads 5 experts' bytes per ms, the link takes 1: while it copies, 4 are left
    shared = replace(SIMPLE, is_shared=True)
    assert shared.host_us(2 * MIB, 2 * MIB, 0) == pytest.approx(400)
    assert shared.host_us(2 * MIB, 2 * MIB, 1e9) == pytest.approx(500)
    assert shared.host_us(2 * MIB, 2 * MIB, 250) == pytest.approx(250 + 200)  # one slow, one fast


def test_host_admit_brings_it_for_the_next_time() -> None:
    run = observe(make_trace([[[0]], [[0]]]), 4, eviction="lru", miss="host-admit")
    assert (run.books.hits, run.books.misses, run.books.loads) == (1, 1, 1)


def test_host_admit_is_capped_per_layer() -> None:
    run = observe(make_trace([[[0, 1, 2, 3]]]), 4, eviction="lru", miss="host-admit:per_layer=3")
    assert run.books.loads == 3


def test_drop_keeps_the_first_ranks() -> None:
    weights = np.array([0.5, 0.3, 0.15, 0.05], np.float32).reshape(1, 1, 4)
    run = observe(make_trace([[[0, 1, 2, 3]]], weights=weights), 4, eviction="lru", miss="drop")
    assert run.books.loads == 2
    assert run.books.to_dict()["fidelity"] == pytest.approx(0.8)


def test_substitute_takes_a_resident_of_near_score() -> None:
    # token 1 wants 1; resident is 0, of near score (0.5): it stands in. Token 2 wants 2 with 0.9: too far
    weights = np.array([0.5, 0.5, 0.9], np.float32).reshape(3, 1, 1)
    run = observe(make_trace([[[0]], [[1]], [[2]]], weights=weights), 1, eviction="lru", miss="substitute")
    assert run.books.loads == 2
    assert run.books.to_dict()["fidelity"] == pytest.approx(1 - 0.5 / 1.9)


def test_low_precision_moves_half_and_is_reported() -> None:
    run = observe(make_trace([[[0]], [[0]]]), 1, eviction="lru", miss="fetch-lowest-bit")
    assert run.books.bytes_moved == MIB / 2
    assert run.books.to_dict()["low_bit_share"] == pytest.approx(1.0)
    assert run.books.to_dict()["fidelity"] == 1.0


def test_fetch_priority_degrades_the_least_important_under_pressure() -> None:
    # token 0 fills both slots in full precision. Token 1: no free slot; the lighter of its two comes low
    weights = np.array([[0.5, 0.5], [0.8, 0.2]], np.float32).reshape(2, 1, 2)
    run = observe(
        make_trace([[[0, 1]], [[2, 3]]], weights=weights), 2, eviction="lru", miss="fetch-priority:low=0.5"
    )
    assert run.books.bytes_moved == (2 + 1.5) * MIB
    assert run.books.low_bit_weight == pytest.approx(0.2)


def test_balance_splits_between_link_and_host() -> None:
    # six misses: one copy takes 1000 us, five on the host take 1000 us: any other split is slower
    run = observe(make_trace([[[0, 1, 2, 3, 4, 5]]]), 8, machine=SIMPLE, eviction="lru", miss="balance")
    assert run.books.loads == 1
    assert run.now == pytest.approx(10 + 1000 + 10)


def logits_trace() -> object:
    """One layer; token 0 takes expert 0, token 1 takes 1, but 0 is close behind."""
    trace = make_trace([[[0]], [[1]]])
    logits = np.full((2, 1, 8), -4.0, np.float16)
    logits[0, 0, 0] = 4.0
    logits[1, 0, 1], logits[1, 0, 0] = 4.0, 3.5
    return replace(trace, logits=logits)


def test_cache_aware_prefers_what_is_resident() -> None:
    # range of the logits: 8. lambda 0.1 gives 0 a bonus of 0.8, more than the gap of 0.5; 0.05 does not
    biased = observe(logits_trace(), 4, eviction="lru", routing="cache-aware:lambda=0.1")  # type: ignore[arg-type]
    assert (biased.books.hits, biased.books.loads) == (1, 1)
    assert biased.books.to_dict()["fidelity"] == pytest.approx(0.5)
    mild = observe(logits_trace(), 4, eviction="lru", routing="cache-aware:lambda=0.05")  # type: ignore[arg-type]
    assert (mild.books.hits, mild.books.to_dict()["fidelity"]) == (0, 1.0)


def test_cache_aware_needs_logits() -> None:
    with pytest.raises(ConfigError, match="logits"):
        observe(make_trace([[[0]]]), 2, eviction="lru", routing="cache-aware")


def test_late_copies_are_computed_on_the_host() -> None:
    slow = replace(PRESETS["rtx4090"], name="slow", link_gb_s=0.001)
    run = observe(make_trace([[[0]], [[0]]]), 2, machine=slow, eviction="lru", miss="host-admit")
    assert run.books.late_loads == 1
    assert run.books.loads == 0
