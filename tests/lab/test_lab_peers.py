"""What other engines do, in the lab: LFU that ages, a second use, quiet copies, slots of a layer's own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tiny import MIB, letters, make_trace, observe, one_layer

from pyspac.errors import ConfigError
from pyspac.lab.eviction.aged_lfu import AgedLfuEstimator
from pyspac.lab.machine import PRESETS
from pyspac.lab.setup import Setup
from pyspac.lab.simulator import Run
from pyspac.lab.workload import make_workload
from pyspac.scheduler.config import SchedulerConfig


def test_lfu_whose_counts_fade_forgets_what_was_used_long_ago() -> None:
    # a twice, b once. A count is worth a quarter after each step: at c a has 1.25 / 16, b 1 / 4: a leaves
    assert letters(observe(one_layer("aabc"), 2, eviction="lfu:keep=0.25").left) == "a"
    assert letters(observe(one_layer("aabc"), 2, eviction="lfu").left) == "b"


def test_aged_lfu_halves_what_it_knows() -> None:
    # a, a, b with a half-life of 2 tokens: before the second a one token counts for half, so a has 1.5 of 2.5
    estimator = AgedLfuEstimator(1, 2, SchedulerConfig(estimator="lfu"), half_every=2)
    for counts in ([1, 0], [1, 0], [0, 1]):
        estimator.update(np.array([counts], np.uint32), 1)
    assert (estimator._sum[0] / estimator._n_tokens).tolist() == pytest.approx([0.6, 0.4])


def test_aged_lfu_runs_the_shipping_scheduler() -> None:
    run = observe(one_layer("abab"), 2, eviction="aged-lfu:half_every=2")
    assert isinstance(run.scheduler.scheduler.estimator, AgedLfuEstimator)  # type: ignore[union-attr]


@pytest.mark.parametrize(("window", "shut_out"), [(64, "bcdefgh"), (1, "abcdefgh")])
def test_a_second_use_within_the_window_lets_an_expert_in(window: int, shut_out: str) -> None:
    # a at tokens 0 and 2; b and c once; the others never
    run = observe(one_layer("abac"), 8, eviction=f"ema:second_use={window}")
    shut = np.flatnonzero(run.policies.eviction.is_shut_out)  # type: ignore[attr-defined]
    assert letters(shut.tolist()) == shut_out


def test_who_was_used_once_is_not_planned_for() -> None:
    # one slot, which the first a fills. b comes again with every token: it is planned and takes the slot,
    # unless a second use would have to come within half a token
    trace = one_layer("abbbbbbbbb")
    assert observe(trace, 1, eviction="ema:second_use=2").books.evictions == 1
    assert observe(trace, 1, eviction="ema:second_use=0.5").books.evictions == 0


SLOW = replace(
    PRESETS["rtx4090"], name="slow", link_gb_s=MIB / 1e6, link_latency_us=0.0, host_gb_s=MIB / 5e5
)  # fmt: skip  a copy takes 1 ms, an expert on the host 0.5 ms


def test_quiet_copies_begin_while_the_host_rests() -> None:
    tokens = [[[i % 4, (i + 1) % 4], [i % 3, 3]] for i in range(24)]
    begun = []
    for knob in (0, 1):
        setup = Setup(capacity="3", eviction="ema:payback_steps=0", prefetch=f"utility:quiet={knob}")
        run = Run(make_workload(make_trace(tokens), 0), setup, SLOW)
        link, starts = run.state.link, []
        start = link._start

        def note(key: int, at: float, starts: list[bool] = starts, link=link, start=start) -> None:  # type: ignore[no-untyped-def]
            starts.append(at >= link._held_until)
            start(key, at)

        link._start = note  # type: ignore[method-assign]
        run.run()
        begun.append(len(starts))
        assert all(starts)
        assert (link._held_until > 0) == bool(knob)
    assert min(begun) > 0


def test_a_held_link_begins_later() -> None:
    run = Run(make_workload(one_layer("ab"), 0), Setup(capacity="2", eviction="lru"), SLOW)
    link = run.state.link
    link.hold(300.0)
    link.submit([(5, 1)], 0.0)
    link.advance(1200.0)
    assert run.state.books.loads == 0
    link.advance(1300.0)
    assert run.state.books.loads == 1


# ---- slots per layer


def test_slots_of_its_own_keep_a_layer_from_growing() -> None:
    # 4 slots. Layer 0 uses three experts, layer 1 one: together they fit; with 2 each layer 0 has to evict
    trace = make_trace([[[0], [0]], [[1], [0]], [[2], [0]]])
    assert observe(trace, 4, eviction="lru").left == []
    assert observe(trace, 4, eviction="lru", per_layer=True).left == [0]


def test_dense_layers_have_no_slots() -> None:
    geometry = replace(make_trace([[[0], [0], [0]]]).geometry, expert_bytes=(MIB, 0, MIB), group=())
    assert geometry.with_own_slots().group == (0, 0, 1)
    assert geometry.with_own_slots().n_group == 2


def test_each_layer_needs_room_for_one() -> None:
    with pytest.raises(ConfigError, match="room for one expert of each layer"):
        observe(make_trace([[[0], [0]]]), 1, eviction="lru", per_layer=True)
