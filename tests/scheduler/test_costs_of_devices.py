"""Several devices: a link, a byte budget, costs and prices of each. The last two layers are the second's."""

from __future__ import annotations

import numpy as np
import pytest
from fake_engine import FakeEngine

from pyspac.engine.board import BoardGeometry, LocalBoard, Residency
from pyspac.engine.device_stats import DeviceFigures, read_devices
from pyspac.scheduler.activations import ActivationDrain
from pyspac.scheduler.balancer import Balancer
from pyspac.scheduler.config import SchedulerConfig
from pyspac.scheduler.cost_model import CostModel
from pyspac.scheduler.occupancy import Occupancy
from pyspac.scheduler.plan_ahead import AheadPlanner, Decided
from pyspac.scheduler.prefetch import Prefetcher
from pyspac.scheduler.scheduler import Scheduler

N_LAYER = 4
OF_LAYER = [0, 0, 1, 1]


def make_board(n_expert: int = 6, n_slots: int = 12, expert_bytes: int = 10) -> LocalBoard:
    return LocalBoard(
        BoardGeometry(
            n_layer=N_LAYER, n_expert=n_expert, n_expert_used=2, expert_bytes=[expert_bytes] * N_LAYER,
            group=OF_LAYER, group_slots=[n_slots] * N_LAYER, layer_device=OF_LAYER,
        )
    )  # fmt: skip


def test_links_are_measured_apart() -> None:
    """1 MB in 1,000 us and 1 MB in 10,000 us, in a step of 2,000 us: half of it copies 1 MB and 0.1 MB."""
    board = make_board()
    drain, cost = ActivationDrain(board), CostModel(board)
    assert cost.link_us_per_byte(1) is None
    board.devices["loaded_bytes"] += np.uint64(1_000_000)
    board.devices["load_us"] += np.array([1_000, 10_000], np.uint64)
    board.layer_stats["layer_us"] += np.uint64(500)
    board.counters["n_forward"] += np.uint64(1)
    cost.update(drain.drain())
    assert [cost.link_us_per_byte(i) for i in (0, 1)] == pytest.approx([0.001, 0.01])
    assert cost.layer_links() == pytest.approx([0.001, 0.001, 0.01, 0.01])
    assert [cost.step_budget_bytes(0.5, i) for i in (0, 1)] == [1_000_000, 100_000]


def test_a_copy_to_a_slow_device_costs_more() -> None:
    """The host works half of the time; a use saves 90 % of its time on one device, 20 % on the other."""
    cost = CostModel(make_board())
    cost.load_us[:], cost.device_us[:] = 100.0, (10.0, 80.0)
    cost.is_host_measured[:] = cost.is_device_measured[:] = True
    cost.step_us, cost.host_us = 1000.0, 500.0
    assert cost.copy_prices() == pytest.approx([0.5 / 0.9, 0.5 / 0.2])


def test_a_slower_device_gets_less() -> None:
    """As test_balancer's: at the host's speed tau is 3, ten times as fast it is 1."""
    board = make_board()
    config = SchedulerConfig(n_levels=4)
    balancer = Balancer(board, config, CostModel(board))
    balancer.uses_free_slots = False
    levels = np.tile(np.array([4, 3, 2, 1, 0, 0], np.uint8), (N_LAYER, 1))
    balancer.tables.place(levels)
    balancer.observe(np.tile(np.array([1, 1, 1, 1, 0, 0], np.uint32), (N_LAYER, 1)))
    cost = balancer.cost
    cost.load_us[:], cost.row_us[:], cost.device_us[:] = 100.0, 0.0, (10.0, 100.0)
    cost.is_host_measured[:] = cost.is_device_measured[:] = True
    assert balancer.solve(levels, Occupancy(board).read(board.residency)).tolist() == [1, 1, 3, 3]


@pytest.mark.parametrize(
    ("limits", "load"),
    [
        ([None, None], [0, 6, 12, 18]),
        ([10, None], [0, 12, 18]),
        ([None, 0], [0, 6, 12]),  # one copy always may go
        ([20, 10], [0, 6, 12]),
    ],
)
def test_each_link_is_rationed_by_itself(limits: list[int | None], load: list[int]) -> None:
    board = make_board()
    utility = np.zeros((N_LAYER, 6), np.uint8)
    utility[:, 0] = 4
    plan = Prefetcher(board, SchedulerConfig(payback_steps=0.0)).plan(
        utility, np.ones(N_LAYER, np.uint8), Occupancy(board).read(board.residency),
        np.zeros((N_LAYER, 6), np.uint32), np.linspace(0.0, 1.0, 256), limits,
    )  # fmt: skip
    assert plan.load.tolist() == load


def test_what_comes_too_late_is_counted_by_link() -> None:
    """All four copies take 20 us by one link and 400 by the other; layers begin 25 us apart."""
    board = make_board(n_slots=24)
    board.residency[:, 3:] = Residency.RESIDENT  # victims
    cost = CostModel(board)
    cost._link_us, cost._link_bytes, cost.step_us = [1.0, 20.0], [1.0, 1.0], 100.0
    chance = np.zeros((N_LAYER, 6), np.float32)
    chance[1:, 0] = 0.9
    decided = Decided(
        utility=np.zeros((N_LAYER, 6), np.uint8), tau=np.ones(N_LAYER, np.uint8),
        counts=np.zeros((N_LAYER, 6), np.uint32), worth=np.array([0.0, 0.5]), byte_limits=[None, None],
    )  # fmt: skip
    config = SchedulerConfig(n_levels=1, payback_steps=1.0)
    plan, _ = AheadPlanner(Prefetcher(board, config), config, cost).plan(
        decided, Occupancy(board).read(board.residency), chance, lead_us=0.0
    )
    assert plan.load.tolist() == [6]  # 10 us for layer 1, which begins at 25
    assert plan.n_late == 2  # 200 and 400 us, for layers that begin at 50 and 75


def test_a_slow_link_holds_fewer_and_lasting_experts() -> None:
    """A machine that is played: one link is a hundred times as slow; requests change now and then."""
    board = make_board(n_expert=32, n_slots=16, expert_bytes=1000)
    engine, scheduler = FakeEngine(board, link_us_per_byte=0.01), Scheduler(board, SchedulerConfig())
    engine.slowness[1] = 100.0
    rng = np.random.default_rng(1)
    for step in range(300):
        if step % 30 == 0:
            favourites = np.array([rng.permutation(32)[:6] for _ in range(N_LAYER)])
        counts = np.zeros((N_LAYER, 32), np.uint32)
        for il in range(N_LAYER):
            counts[il, rng.choice(favourites[il], 2, replace=False)] = 1
        engine.forward(counts)
        scheduler.step()
    fast, slow = read_devices_of(board)
    assert board.byte_budget[1] < board.byte_budget[0]
    assert 0 < slow.loaded_bytes < fast.loaded_bytes / 2
    assert slow.link_gb_s == pytest.approx(0.001, rel=0.01)
    assert fast.coverage > slow.coverage


def read_devices_of(board: LocalBoard) -> list[DeviceFigures]:
    board.devices["n_slots"] = 16
    return read_devices(board)
