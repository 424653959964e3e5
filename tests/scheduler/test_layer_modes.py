"""Which layers are whole: the choice by hand, and on a simulated device against fixed numbers of them."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from simulated_device import DEVICE_US, N_EXPERT, N_LAYER, N_USED, SimulatedDevice

from pyspac.engine.board import BoardGeometry, LayerMode, LocalBoard
from pyspac.scheduler.config import SchedulerConfig
from pyspac.scheduler.layer_modes import EVERY, FIRST, N_SAMPLES, N_TOGETHER, PATIENCE
from pyspac.scheduler.scheduler import Scheduler
from pyspac.scheduler.stop_cost import StopCost, StopCosts, n_whole_after
from pyspac.scheduler.whole_layers import Demand, LayerCost, Room, choose_whole, predict_us, time_of

# ---- the choice ------------------------------------------------------------------------------------------

# Two layers of 4 experts, two levels: of layer 0 one expert is always used; of layer 1 all are, now and then.
DEMAND = Demand(
    n_experts=np.array([[1.0, 3.0], [0.0, 4.0]]),
    host_us=np.array([[90.0, 10.0], [0.0, 100.0]]),
    device_us=np.array([[9.0, 1.0], [0.0, 10.0]]),
)
BOTH = np.array([0, 1])


def test_times_by_hand() -> None:
    # Three slots: one for the upper level's expert, two for the seven below: 5 / 7 of them are the host's.
    cost = LayerCost(base_us=50.0, saved_us=20.0)
    us = predict_us(DEMAND, BOTH, 3, cost)
    assert us == pytest.approx([50.0 + 9.0 + 2 / 7, 50.0 + 500 / 7])  # the device has more to do in layer 0
    one_after_the_other = predict_us(DEMAND, BOTH, 3, cost._replace(is_concurrent=False))
    assert one_after_the_other == pytest.approx([50 + 50 / 7 + 9 + 2 / 7, 50 + 500 / 7 + 20 / 7])
    # Five slots: layer 1 takes four of them, layer 0 has the one that it needs: its host has 10.
    is_whole = np.array([False, True])
    assert time_of(DEMAND, BOTH, is_whole, Room(5, 4), cost) == pytest.approx(50.0 + 10.0 + 30.0)


@pytest.mark.parametrize(
    ("n_slots", "saved_us", "expected"),
    [
        (3, 1000.0, []),  # there is no room
        (5, 0.0, [1]),  # 60 and 50 us, against 59.6 and 92.9 of split layers
        (8, 5.0, [0, 1]),
    ],
)
def test_the_layer_with_the_flattest_demand_comes_first(
    n_slots: int, saved_us: float, expected: list[int]
) -> None:
    cost = LayerCost(base_us=50.0, saved_us=saved_us)
    found = choose_whole(DEMAND, BOTH, Room(n_slots, 4), cost)
    assert np.flatnonzero(found.is_whole).tolist() == expected
    assert found.us == pytest.approx(time_of(DEMAND, BOTH, found.is_whole, Room(n_slots, 4), cost))


def test_never_slower_than_none_or_all_that_fit() -> None:
    rng = np.random.default_rng(1)
    layers = np.arange(8)
    for _ in range(50):
        n = rng.multinomial(16, np.ones(5) / 5, 8).astype(float)
        host = n * np.sort(rng.random((8, 5)) * 50)[:, ::-1]
        cost = LayerCost(100.0, float(rng.uniform(-20, 100)))
        demand, room = Demand(n, host, host / 8), Room(int(rng.integers(0, 129)), 16)
        best = choose_whole(demand, layers, room, cost)
        for n_whole in range(9):
            assert best.us <= choose_whole(demand, layers, room, cost, n_whole=n_whole).us + 1e-9


def test_who_follows_whom() -> None:
    is_whole = np.array([True, False, True, False, False, True, True])
    is_ours = np.array([True] * 6 + [False])
    assert n_whole_after(is_whole, is_ours).tolist() == [0, 1, 0, 0, 1, 0, 0]
    assert n_whole_after(np.ones(3, bool), np.ones(3, bool)).tolist() == [0, 0, 0]


def layer_stats(us: list[int]) -> np.ndarray:
    stats = LocalBoard(
        BoardGeometry.uniform(n_layer=len(us), n_expert=1, n_expert_used=1, n_slots=1)
    ).layer_stats
    stats["n_calls"], stats["layer_us"] = 3, us
    return stats


def test_a_stop_is_what_a_whole_layer_saves() -> None:
    """Three calls per step. Beside their experts layers take 100, 200, 80 and 60, whole ones 50 and 40."""
    cost, none = StopCost(np.ones(5, bool)), np.zeros(5, np.int64)
    is_whole = np.array([False, False, True, True, False])
    busy = np.array([40.0, 20.0, 0.0, 0.0, 0.0])
    for i in range(60):
        accident = 100_000 if i == 12 else 0
        stats = layer_stats([300 + 40, 600 + 20 + accident, 240, 180, 0])  # the last layer has no time
        cost.observe(stats, none, busy, np.zeros(5, bool))
    assert cost.saved_us is None
    assert cost.base_us == pytest.approx(90.0, rel=0.05)
    after = n_whole_after(is_whole, np.ones(5, bool))
    for i in range(9):
        pace = (1, 2)[i % 2]  # the machine is slower at times
        us = [pace * 300 + 40, pace * 3 * (200 + 50 + 40) + 20 + 50_000 * (i == 4), 0, 0, 0]
        cost.observe(layer_stats(us), after, busy, is_whole)
    assert cost.saved_us == pytest.approx(1.2 * (80 + 60 - 50 - 40) / 2, abs=8)  # at the pace of now


def test_devices_are_told_apart_where_whole_layers_of_one_follow() -> None:
    """Four layers of each device take 100 and 60, whole ones 10 and 50 less; three calls per sample."""
    device = np.repeat([0, 1], 4)
    base, saved = np.where(device == 0, 100.0, 60.0), np.where(device == 0, 10.0, 50.0)
    costs = StopCosts(device, 2)

    def observe(*layers: int) -> list[int]:
        is_whole = np.isin(np.arange(8), layers)
        after, us = n_whole_after(is_whole, np.ones(8, bool)), np.zeros(8)
        for il in np.flatnonzero(~is_whole)[:-1]:  # the last layer of a forward has no time
            following = slice(il + 1, il + 1 + after[il])
            us[il] = base[il] + (base - saved)[following].sum()
        costs.observe(layer_stats((3 * us).astype(int).tolist()), after, np.zeros(8), is_whole)
        return [costs.of(i).n_samples for i in (0, 1)]

    for _ in range(20):
        observe()
    assert costs.saved_us(0) is None
    assert observe(3, 4) == [0, 0]  # one of each, behind one layer: whose the time is cannot be said
    assert costs.saved_us(0) == costs.saved_us(1) == pytest.approx(30.0)
    assert observe(1) == [1, 0]
    assert observe(6) == [1, 1]
    assert [costs.saved_us(i) for i in (0, 1)] == pytest.approx([10.0, 50.0])
    assert costs.layer_cost(1, is_concurrent=True) == pytest.approx((60.0, 50.0, True))
    assert observe(1, 4) == [2, 1]  # the second device's is behind a layer of the first


# ---- on a simulated device -------------------------------------------------------------------------------


def run(
    device: SimulatedDevice, n_steps: int, *, whole: np.ndarray | None = None, without: str = "fallback"
) -> tuple[np.ndarray, Scheduler]:
    """Microseconds of each step; `whole`: these layers, whatever the scheduler thinks."""
    scheduler = Scheduler(device.board, SchedulerConfig(without=frozenset(without.split(","))))
    if whole is not None:
        scheduler.layers.wanted_in = lambda way: whole  # type: ignore[method-assign]
    us = np.zeros(n_steps)
    for i in range(n_steps):
        us[i] = device.step()
        scheduler.step()
    return us, scheduler


N_UNTIL_CHOSEN = 2 * FIRST + N_TOGETHER * N_SAMPLES + 50


@pytest.mark.parametrize("cache", [0.05, 0.25, 0.5, 0.75])
@pytest.mark.parametrize("stop_us", [0.0, 20.0, 60.0, 200.0])
def test_as_fast_as_the_best_fixed_number(stop_us: float, cache: float) -> None:
    """Within 3 %, of none, half of those that fit, and all that fit, which is --n-cpu-moe; that one never."""
    us, scheduler = run(SimulatedDevice(cache, stop_us), N_UNTIL_CHOSEN + 100)
    ours = us[-100:].mean()
    room = Room(scheduler.board.n_slots, N_EXPERT)
    demand, n_most = scheduler.layers._demand(), room.n_slots // N_EXPERT
    fixed = {}
    for n_whole in {0, n_most // 2, n_most}:
        choice = choose_whole(demand, np.arange(N_LAYER), room, LayerCost(100.0, 50.0), n_whole=n_whole)
        fixed[n_whole] = run(SimulatedDevice(cache, stop_us), 200, whole=choice.is_whole)[0][-100:].mean()
    assert ours < 1.03 * min(fixed.values()), fixed
    assert ours < fixed[n_most], fixed
    assert scheduler.layers.n_changes <= 2  # a probe, and a choice


@pytest.mark.parametrize(
    ("stops", "cache"), [((0.0, 200.0), 0.5), ((200.0, 0.0), 0.75), ((60.0, 0.0), 0.5), ((20.0, 100.0), 0.25)]
)
def test_two_devices_of_unequal_stops(stops: tuple[float, float], cache: float) -> None:
    """Within 3 % of the best of nine fixed numbers: each device none, half, or all that fit."""
    us, scheduler = run(SimulatedDevice(cache, stops), N_UNTIL_CHOSEN + 100)
    room = Room(int(scheduler.board.group_slots[0]), N_EXPERT)
    demand, n_most = scheduler.layers._demand(), room.n_slots // N_EXPERT
    fixed = {}
    for numbers in product((0, n_most // 2, n_most), repeat=2):
        whole = np.zeros(N_LAYER, bool)
        for layers, n_whole in zip(np.arange(N_LAYER).reshape(2, -1), numbers, strict=True):
            whole |= choose_whole(demand, layers, room, LayerCost(100.0, 50.0), n_whole=n_whole).is_whole
        fixed[numbers] = run(SimulatedDevice(cache, stops), 160, whole=whole)[0][-100:].mean()
    assert us[-100:].mean() < 1.03 * min(fixed.values()), fixed
    # where a stop costs nothing, a whole layer saves nothing, and its experts take the device's time
    experts_us = N_USED * DEVICE_US
    assert scheduler.layers.to_dict()["saved_us"] == pytest.approx(
        [stop - experts_us for stop in stops], abs=25
    )
    assert scheduler.layers.n_changes <= 2  # a probe of both, and a choice


def test_a_device_whose_layers_never_get_whole_keeps_nobody_waiting() -> None:
    device = SimulatedDevice(0.5, (200.0, 200.0))
    device.is_never_filled[1] = True
    _, scheduler = run(device, N_UNTIL_CHOSEN + PATIENCE)
    assert (device.board.whole == LayerMode.WHOLE).nonzero()[0].max() < N_LAYER // 2
    assert scheduler.layers.gain
    saved_us = scheduler.layers.to_dict()["saved_us"]
    assert saved_us == pytest.approx(2 * [200.0 - N_USED * DEVICE_US], abs=25)  # of the second: as the first


def test_a_step_imports_nothing() -> None:
    """What it needs is there before the first one: an import takes 20 ms, in which nobody decodes."""
    code = """if True:
        import sys
        from simulated_device import SimulatedDevice
        from pyspac.scheduler.config import SchedulerConfig
        from pyspac.scheduler.scheduler import Scheduler

        device = SimulatedDevice(0.5, 60.0)
        scheduler = Scheduler(device.board, SchedulerConfig())
        before = set(sys.modules)
        for _ in range(400):
            device.step()
            scheduler.step()
        assert scheduler.layers.n_changes == 2
        assert scheduler.fallback.n_trials
        print(sorted(set(sys.modules) - before))
    """
    path = os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_the_choice_changes_rarely_and_demand_stands_still() -> None:
    device = SimulatedDevice(0.5, 60.0)
    _, scheduler = run(device, N_UNTIL_CHOSEN)
    is_whole = device.board.whole == LayerMode.WHOLE
    assert is_whole.any()
    assert not is_whole.all()
    before, levels = scheduler.layers._demand(), scheduler.estimator.utility[is_whole].copy()
    n_changes = scheduler.layers.n_changes
    for _ in range(EVERY + 100):
        device.step()
        scheduler.step()
    assert scheduler.layers.n_changes == n_changes
    after = scheduler.layers._demand()
    assert np.array_equal(scheduler.estimator.utility[is_whole], levels)
    assert after.n_experts[is_whole] == pytest.approx(before.n_experts[is_whole])
    assert 0.1 < (scheduler.layers.gain or 0.0) < 0.2
    found = scheduler.layers.to_dict()
    assert found["layers"] == np.flatnonzero(is_whole).tolist()
    assert found["saved_us"] == pytest.approx([60.0], abs=25.0)


@pytest.mark.parametrize("without", ["whole", "evict", "prefetch", "hetwb"])
def test_a_user_who_says_otherwise_is_obeyed(without: str) -> None:
    device = SimulatedDevice(0.5, 200.0)
    _, scheduler = run(device, N_UNTIL_CHOSEN, without=without)
    assert not scheduler.layers.is_on
    assert not device.board.want_whole.any()
    assert not SchedulerConfig(estimator="spac").has_whole_layers


def test_an_engine_that_cannot_is_asked_no_more() -> None:
    device = SimulatedDevice(0.5, 200.0)
    device.can_be_whole = False
    _, scheduler = run(device, N_UNTIL_CHOSEN + PATIENCE)
    assert not scheduler.layers.is_on
    assert not device.board.want_whole.any()


def test_a_new_scheduler_finds_layers_that_are_whole() -> None:
    device = SimulatedDevice(0.5, 200.0)
    device.board.whole[:3] = LayerMode.WHOLE
    scheduler = Scheduler(device.board, SchedulerConfig())
    scheduler.step()
    assert scheduler.slots.groups.is_split.tolist() == [False] * 3 + [True] * (N_LAYER - 3)
    assert scheduler.slots.groups.slots.tolist() == [device.board.n_slots - 3 * N_EXPERT]


def test_without_slots_for_a_layer_nothing_is_tried() -> None:
    device = SimulatedDevice(0.03, 200.0)
    assert device.board.n_slots < N_EXPERT
    _, scheduler = run(device, N_UNTIL_CHOSEN)
    assert not scheduler.layers.is_on
    assert scheduler.layers.n_changes == 0
