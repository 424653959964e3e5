"""Miss and routing policies on cases worked by hand, and what lossy ones cost in router weight."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tiny import MIB, Observed, make_trace, observe

from pyspac.errors import ConfigError, PyspacError
from pyspac.lab.machine import PRESETS, Machine
from pyspac.lab.policy import FETCH, HOST, MissPlan
from pyspac.lab.registry import find
from pyspac.lab.trace import Trace

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
    assert run.state.now_us == pytest.approx(10 + 2000 + 10)  # dense, two copies, the second expert
    assert run.books.stall_us == pytest.approx(2000 - 10)
    assert run.books.bytes_moved == 2 * MIB


@pytest.mark.parametrize("fates", [[HOST], [HOST, 4], [-1, FETCH], []])
def test_every_miss_has_a_fate(monkeypatch: pytest.MonkeyPatch, fates: list[int]) -> None:
    """One that nobody computes would cost nothing."""
    monkeypatch.setattr(find("miss", "host"), "handle", lambda *_: MissPlan(np.array(fates, np.int8)))
    with pytest.raises(PyspacError, match="the miss policy host gave the fates"):
        observe(make_trace([[[0, 1]]]), 4, machine=SIMPLE, eviction="lru", miss="host")


def test_host_computes_and_copies_nothing() -> None:
    run = observe(make_trace([[[0, 1]]]), 4, machine=SIMPLE, eviction="lru", miss="host")
    assert run.state.now_us == pytest.approx(10 + 400)
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


RANKS = np.array([0.5, 0.3, 0.15, 0.05], np.float32).reshape(1, 1, 4)


def test_drop_may_leave_the_others_to_the_host() -> None:
    # ranks 0 to 2 take 200 us each on the host, rank 3 (0.05 of the weight) is left out; nothing is copied
    trace = make_trace([[[0, 1, 2, 3]]], weights=RANKS)
    run = observe(trace, 4, machine=SIMPLE, eviction="lru", miss="drop:keep=3,host=1")
    assert run.state.now_us == pytest.approx(10 + 600)
    assert run.books.loads == 0
    assert run.books.to_dict()["fidelity"] == pytest.approx(0.95)


@pytest.mark.parametrize(("miss", "fills"), [("host", 1), ("drop:host=1", 1), ("drop", 0), ("substitute", 0)])
def test_free_slots_fill_where_the_host_computes_misses(miss: str, fills: int) -> None:
    run = observe(make_trace([[[0]], [[0]]]), 4, eviction="ema", miss=miss)
    assert run.state.decision.fills == bool(fills)


def test_drop_counts_the_best_rank_of_any_token() -> None:
    # one step of two tokens: 1 is the first token's second choice and the other one's first: it stays
    trace = make_trace([[[0, 1]], [[1, 2]]])
    run = observe(trace, 4, k=1, eviction="lru", miss="drop:keep=1")
    assert run.books.loads == 2  # 0 and 1; 2 is left out


def test_drop_cascade_goes_from_full_to_low_precision_to_nothing() -> None:
    # by rank: 1, 1/2, 1/2 of the bytes, and nothing for the last
    run = observe(
        make_trace([[[0, 1, 2, 3]]], weights=RANKS), 4, eviction="lru",
        miss="drop-priority-cascade:keep=1,low=3",
    )  # fmt: skip
    assert run.books.bytes_moved == 2 * MIB
    assert run.books.to_dict()["fidelity"] == pytest.approx(0.95)
    assert run.books.to_dict()["low_bit_share"] == pytest.approx(0.45)


def test_fetch_priority_has_three_precisions() -> None:
    # no slot is free: the lower half of four comes in fewer bits, the lowest quarter in a quarter of them
    trace = make_trace([[[4, 5, 6, 7]], [[0, 1, 2, 3]]], weights=np.repeat(RANKS, 2, axis=0))
    run = observe(trace, 4, eviction="lru", miss="fetch-priority:low=0.5,lowest=0.25")
    assert run.books.bytes_moved == (4 + 1 + 1 + 0.5 + 0.25) * MIB
    assert run.books.low_bit_weight == pytest.approx(0.2)


def test_a_substitute_or_the_host() -> None:
    # the cache is empty, so nothing can stand in: both are computed on the host, none is fetched
    run = observe(make_trace([[[0, 1]]]), 4, machine=SIMPLE, eviction="lru", miss="substitute:host=1")
    assert run.state.now_us == pytest.approx(10 + 400)
    assert run.books.loads == 0


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
        make_trace([[[0, 1]], [[2, 3]]], weights=weights),
        2,
        eviction="lru",
        miss="fetch-priority:low=0.5,lowest=0",
    )
    assert run.books.bytes_moved == (2 + 1.5) * MIB
    assert run.books.low_bit_weight == pytest.approx(0.2)


def test_balance_splits_between_link_and_host() -> None:
    # six misses: one copy takes 1000 us, five on the host take 1000 us: any other split is slower
    run = observe(make_trace([[[0, 1, 2, 3, 4, 5]]]), 8, machine=SIMPLE, eviction="lru", miss="balance")
    assert run.books.loads == 1
    assert run.state.now_us == pytest.approx(10 + 1000 + 10)


def logits_trace(base: float, second: tuple[float, float]) -> Trace:
    """One layer of 8; token 0 takes expert 0 (logit 9), token 1's logits of experts 0 and 1 are `second`."""
    trace = make_trace([[[0]], [[int(second[1] > second[0])]]], weights=np.ones((2, 1, 1), np.float32))
    logits = np.full((2, 1, 8), base, np.float16)
    logits[0, 0, 0] = 9.0
    logits[1, 0, :2] = second
    return replace(trace, logits=logits)


def cache_aware(trace: Trace, knobs: str) -> Observed:
    return observe(trace, 4, eviction="lru", routing=f"cache-aware:{knobs}")


def test_cache_aware_adds_the_mean_logit() -> None:
    # means: token 0 (9 + 7) / 8 = 2, token 1 (8.5 + 9 + 6) / 8 = 2.94, of both 2.47. Token 1 wants 1, the
    # resident 0 is 0.5 behind: a bonus of 0.25 * 2.47 = 0.62 turns it, one of 0.2 * 2.47 = 0.49 does not
    trace = logits_trace(1.0, (8.5, 9.0))
    turned = cache_aware(trace, "lambda=0.25").books
    assert (turned.hits, turned.loads) == (1, 1)
    kept = cache_aware(trace, "lambda=0.2").books
    assert (kept.hits, kept.to_dict()["fidelity"]) == (0, 1.0)


def test_cache_aware_may_add_the_range_instead() -> None:
    # the range is 8 in both tokens: 0.1 * 8 = 0.8, 0.05 * 8 = 0.4
    trace = logits_trace(1.0, (8.5, 9.0))
    assert cache_aware(trace, "lambda=0.1,range=1").books.hits == 1
    assert cache_aware(trace, "lambda=0.05,range=1").books.hits == 0


def test_cache_aware_puts_residents_back_where_logits_are_negative() -> None:
    # means: (9 - 28) / 8 = -2.38, (1 + 0.5 - 24) / 8 = -2.81, of both -2.59: a quarter is more than 0.5
    run = cache_aware(logits_trace(-4.0, (1.0, 0.5)), "lambda=0.25")
    assert run.books.hits == 0


def test_a_stand_in_has_the_weight_that_the_router_gives_it() -> None:
    # token 1: expert 0 stands in for 1, with exp(8.5 - 9) = 0.607 of its weight 1; of 2 in all 0.393 is lost
    run = cache_aware(logits_trace(1.0, (8.5, 9.0)), "lambda=0.25")
    assert run.books.router_weight == pytest.approx(2.0)
    assert run.books.to_dict()["fidelity"] == pytest.approx(1 - (1 - np.exp(-0.5)) / 2)


def test_a_stand_ins_weight_counts_for_what_comes_after() -> None:
    run = observe(logits_trace(1.0, (8.5, 9.0)), 4, eviction="score", routing="cache-aware:lambda=0.25")
    assert run.policies.eviction.worth[0] == pytest.approx(1 + np.exp(-0.5))


def test_cache_aware_needs_logits() -> None:
    with pytest.raises(ConfigError, match="logits"):
        observe(make_trace([[[0]]]), 2, eviction="lru", routing="cache-aware")


def test_late_copies_are_computed_on_the_host() -> None:
    slow = replace(PRESETS["rtx4090"], name="slow", link_gb_s=0.001)
    run = observe(make_trace([[[0]], [[0]]]), 2, machine=slow, eviction="lru", miss="host-admit")
    assert run.books.late_loads == 1
    assert run.books.loads == 0
