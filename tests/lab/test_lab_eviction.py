"""Every eviction policy on a case worked by hand."""

from __future__ import annotations

import numpy as np
import pytest
from tiny import letters, make_trace, observe, one_layer

from pyspac.errors import ConfigError
from pyspac.lab.events import Access, StepOver, StepTimes
from pyspac.lab.machine import PRESETS
from pyspac.lab.registry import names
from pyspac.lab.setup import Setup
from pyspac.lab.simulator import Run
from pyspac.lab.workload import make_workload


def books(run: object) -> tuple[int, int, int]:
    b = run.books  # type: ignore[attr-defined]
    return b.hits, b.misses, b.evictions


def test_lru() -> None:
    # 2 slots: a b miss, a hits, c takes b's slot (oldest), a hits, b takes c's
    run = observe(one_layer("abacab"), 2, eviction="lru")
    assert books(run) == (2, 4, 2)
    assert letters(run.left) == "bc"


def test_lfu() -> None:
    # a is used twice, so c takes b's slot although b is younger; then b takes c's
    run = observe(one_layer("aabcb"), 2, eviction="lfu")
    assert books(run) == (1, 4, 2)
    assert letters(run.left) == "bc"


def test_belady_bypasses_what_never_returns() -> None:
    # c is not used again: it is computed and not kept, so that a and b hit
    run = observe(one_layer("abcab"), 2, eviction="belady")
    assert books(run) == (2, 3, 0)
    assert run.books.bypassed == 1
    assert run.books.loads == 3


def test_belady_evicts_the_farthest() -> None:
    # at c: a returns at 3, b at 5, c at 4: b leaves; at b (5) nobody returns: the first slot's a leaves
    run = observe(one_layer("abcacb"), 2, eviction="belady")
    assert books(run) == (2, 4, 2)
    assert letters(run.left) == "ba"


FAR = make_trace([[[0], [0], [0]]] * 2, n_expert=2)  # 3 layers; keys 0, 2, 4


def test_farthest_layer_is_the_plain_distance() -> None:
    # 2 slots. Token 0, layer 2: layer 0 is 2 away, layer 1 is 1: 0 leaves, which is needed next. Token 1,
    # layer 0: of layers 1 and 2 the latter is farther: 4 leaves, and is missed in the same step
    run = observe(FAR, 2, eviction="farthest-layer")
    assert run.left == [0, 4, 0]
    assert run.books.collision_misses == 1


def test_farthest_layer_cyclic_counts_the_layers_to_go() -> None:
    # token 0, layer 2: layer 0 comes next, layer 1 one later: layer 1's leaves. Token 1: layer 0 hits; at
    # layer 1 the residents are of layer 0 (2 to go) and 2 (next): 0 leaves
    run = observe(FAR, 2, eviction="farthest-layer:cyclic=1")
    assert run.left == [2, 0]
    assert run.books.collision_misses == 0


def test_score() -> None:
    # accumulated weights a 0.9, b 0.1: c takes b's slot; b comes back for c (0.5 against 0.9)
    trace = make_trace([[[0]], [[1]], [[2]], [[1]]])
    weights = np.array([0.9, 0.1, 0.5, 0.1], np.float32).reshape(4, 1, 1)
    trace = make_trace([[[0]], [[1]], [[2]], [[1]]], weights=weights)
    assert letters(observe(trace, 2, eviction="score").left) == "bc"


STALE = [[[0], [0]], [[1], [1]], [[2], [1]], [[3], [1]]]  # (layer 0, layer 1) by token


def test_least_stale_prefers_stale_experts_of_low_layers() -> None:
    # 4 slots hold tokens 0 and 1. Token 2, layer 0: all are stale, layer 0's oldest leaves: expert 0.
    # Token 3, layer 0: stale are layer 1's 0 (token 0) and layer 0's 1 and 2: by layer, then oldest: 1
    run = observe(make_trace(STALE), 4, eviction="least-stale")
    assert run.left == [0, 1]


def test_lru_on_the_same_trace_takes_the_oldest() -> None:
    run = observe(make_trace(STALE), 4, eviction="lru")
    assert run.left == [0, 8 + 0]


def test_least_stale_keeps_current_experts_until_the_end() -> None:
    # 2 slots, three layers: at layer 2 of each token both residents are current
    run = observe(make_trace([[[0], [0], [0]], [[0], [0], [0]]], n_expert=2), 2, eviction="least-stale")
    # token 0: 0, 2 fill; 4 evicts 0 (current, lowest layer). token 1: 0 evicts 2 (stale, layer 1 before 2);
    # 2 evicts 4 (stale); 4 evicts 0 (both current, lowest layer)
    assert run.left == [0, 2, 4, 0]


def test_least_stale_cyclic_lets_the_longest_waiting_go_first() -> None:
    run = observe(
        make_trace([[[0], [0], [0]], [[0], [0], [0]]], n_expert=2), 2, eviction="least-stale:cyclic=1"
    )
    # token 0: at layer 2 both are current; layer 1's has longest to wait. token 1: 0 hits; 2 evicts 4
    # (stale), 4 evicts 2 (both current: layer 1's waits longer than layer 0's)
    assert run.left == [2, 4, 2]


def test_a_collision_is_a_miss_of_what_left_in_the_same_step() -> None:
    # 2 slots: token 1's two experts of layer 0 push both residents out; layer 1 misses its 1: a collision
    trace = make_trace([[[0], [1]], [[2, 3], [1]]])
    run = observe(trace, 2, eviction="lru")
    assert run.left == [0, 8 + 1, 2]
    assert run.books.collision_misses == 1
    assert run.books.collisions_by_layer.tolist() == [0, 1]


def test_lhu_counts_high_precision_uses_only() -> None:
    # 2 slots. a b come in full precision (slots are free), a hits once: 2 uses. c comes low (no free slot): 0
    # high-precision uses, in place of b (1). Then d takes c's slot although c is the youngest
    run = observe(one_layer("abacd"), 2, eviction="lhu", miss="fetch-priority:low=1,lowest=0")
    assert letters(run.left) == "bc"
    assert run.books.bytes_moved == (1 + 1 + 0.5 + 0.5) * (1 << 20)


def test_arc_protects_what_was_seen_twice() -> None:
    # 2 slots: a twice -> T2; b, c, d pass through T1 and take one another's slot
    run = observe(one_layer("aabcda"), 2, eviction="arc")
    assert letters(run.left) == "bc"
    assert run.books.hits == 2


def test_static_keeps_whole_layers_from_the_end() -> None:
    # 3 layers of 8 MiB and room for 20: layers 2 and 1 are on the device, layer 0 on the host
    run = observe(make_trace([[[0], [0], [0]]] * 4), 20, eviction="static")
    assert run.books.hits == 8
    assert run.books.misses == 4
    assert run.books.loads == 0
    assert run.books.misses_by_layer.tolist() == [4, 0, 0]


def test_static_profile_keeps_the_prompts_hottest() -> None:
    trace = make_trace([[[0]], [[1]], [[1]], [[1]], [[0]]], status=np.array([0, 0, 0, 1, 1], np.uint8))
    run = observe(trace, 1, eviction="static-profile")
    assert (run.books.hits, run.books.misses) == (1, 1)


def test_unbounded_never_misses() -> None:
    run = observe(one_layer("abcdefgh"), 1, eviction="unbounded")
    assert books(run) == (8, 0, 0)


def test_last_evicts_what_the_last_step_did_not_use() -> None:
    # demand loading with the shipping estimator `last`: c takes a's slot, since b was used last
    run = observe(one_layer("abcb"), 2, eviction="last", prefetch="none", miss="fetch")
    assert letters(run.left) == "a"
    assert run.books.hits == 1


def spac_boundaries(knobs: str, k: int) -> set[int]:
    run = observe(one_layer("aaaa"), 2, k=k, eviction=f"spac{knobs}")
    return set(run.scheduler.scheduler.estimator.up[0, 1:].tolist())  # type: ignore[union-attr, attr-defined]


def test_spac_without_drafts_takes_the_papers_gamma() -> None:
    # of experts that are never used, whose boundaries stay where they began: half of 8, of 2, of the given 6
    assert (spac_boundaries("", 0), spac_boundaries("", 2), spac_boundaries(":gamma=6", 0)) == ({4}, {1}, {3})


BOTH = make_trace([[[0, 1]]] * 5)  # two experts in every token


def test_what_was_used_keeps_its_utility() -> None:
    # one slot: 0 takes it and stays, as 1 is worth no more
    run = observe(BOTH, 1, eviction="last:budget=0,n_levels=1")
    assert (run.left, run.books.hits) == ([], 4)


def test_reset_lets_go_what_was_used_until_it_is_copied_again() -> None:
    # 0, used by token 1, is worth nothing then: 1 takes its slot; used by token 2, 0 takes it back, and so on
    run = observe(BOTH, 1, eviction="last:budget=0,n_levels=1,reset=2")
    assert run.left == [0, 1, 0, 1]


def test_reset_until_the_next_decision() -> None:
    run = Run(make_workload(BOTH, 0), Setup(eviction="last:reset=1", capacity="1"), PRESETS["instant"])
    state, eviction, demand = run.state, run.policies.eviction, run.workload.steps[0].layers[0]
    state.decision.utility[:2] = 1
    may_leave = [eviction.may_leave(np.array([0]), 1)]
    access = Access(0, np.array([0]), demand, np.ones(2, bool), np.zeros(0, np.intp), None)
    eviction.on_access(access)
    may_leave.append(eviction.may_leave(np.array([0]), 1))
    eviction.on_step_over(StepOver(0, 1, 0, 1, [demand], StepTimes()))
    may_leave.append(eviction.may_leave(np.array([0]), 1))
    assert [bool(found) for found in may_leave if found is not None] == [False, True, False]


def test_cold_residents_run_on_the_device_unless_told_otherwise() -> None:
    # three slots for three experts in turn: all stay resident, at level 2 after use, at 0 when asked again
    shipped = observe(one_layer("abcabcabc"), 3, eviction="utility-lru:budget=0,n_levels=2,threshold=2")
    told = observe(
        one_layer("abcabcabc"), 3, eviction="utility-lru:budget=0,n_levels=2,threshold=2,cold_on_host=1"
    )
    assert (shipped.books.hits, told.books.hits) == (6, 0)
    assert shipped.books.loads == told.books.loads == 3


def test_cold_residents_cannot_be_fetched() -> None:
    with pytest.raises(ConfigError, match="--miss"):
        observe(BOTH, 1, eviction="ema:cold_on_host=1", miss="fetch")


@pytest.mark.parametrize("name", names("eviction"))
def test_every_policy_explains_itself(name: str) -> None:
    import sys

    from pyspac.lab.registry import find

    doc = sys.modules[find("eviction", name).__module__].__doc__ or ""
    assert "nob" in doc, "the docstring names the knob, or says that there is none"
