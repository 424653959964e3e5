"""Unit times fitted from a running graph."""

from __future__ import annotations

import numpy as np
import pytest

from pyspac.engine.board import BoardGeometry, LocalBoard
from pyspac.engine.step import StepRecord
from pyspac.scheduler.activations import ActivationDrain
from pyspac.scheduler.cost_model import DEVICE_SHARE, HOST_US_PER_BYTE, ROW_SHARE, CostModel

N_LAYER = 4


class Graph:
    """Plays the engine's clock: adds layer statistics made from known unit times."""

    def __init__(
        self, group: list[int] | None = None, link_gb_s: float | None = None, is_in_graph: bool = False
    ) -> None:
        self.board = LocalBoard(
            BoardGeometry(
                n_layer=N_LAYER, n_expert=16, n_expert_used=2, expert_bytes=[1_000_000] * N_LAYER,
                group=group or [0] * N_LAYER, group_slots=[8] * N_LAYER,
            )
        )  # fmt: skip
        self.board.devices["is_in_graph"] = is_in_graph
        self.drain = ActivationDrain(self.board)
        self.cost = CostModel(self.board, link_gb_s=link_gb_s)

    def step(self, **columns: list[float] | float) -> None:
        stats = self.board.layer_stats
        for name, values in {"n_calls": 1, **columns}.items():
            stats[name] += np.broadcast_to(values, N_LAYER).astype(np.uint64)
        self.board.counters["n_forward"] += np.uint64(1)
        self.cost.update(self.drain.drain())


def host_us(n_experts: list[int], n_rows: list[int], load_us: float, row_us: float) -> list[float]:
    return [n * load_us + m * row_us for n, m in zip(n_experts, n_rows, strict=True)]


def test_one_step_by_hand() -> None:
    # Four layers, one expert each, one row each, 110 us each. Every layer says load + row = 110, nothing
    # more, so the pull towards row = 0.1 * load decides: 100 and 10.
    graph = Graph()
    graph.step(n_host_experts=1, n_host_rows=1, host_us=110, layer_us=160)
    assert graph.cost.load_us[0] == pytest.approx(100.0)
    assert graph.cost.row_us[0] == pytest.approx(10.0)


def test_defaults_until_measured() -> None:
    cost = Graph().cost
    assert cost.load_us[0] == pytest.approx(1e6 * HOST_US_PER_BYTE)
    assert cost.row_us[0] == pytest.approx(ROW_SHARE * cost.load_us[0])
    assert cost.device_us[0] == pytest.approx(DEVICE_SHARE * cost.load_us[0])
    assert cost.link_us_per_byte() is None
    assert cost.step_budget_bytes(1.0) is None
    assert not cost.is_balanceable


def test_host_times_are_recovered() -> None:
    graph = Graph()
    rng = np.random.default_rng(1)
    for _ in range(60):
        n_experts = rng.integers(1, 9, N_LAYER).tolist()
        n_rows = [n + int(rng.integers(0, 10)) for n in n_experts]
        graph.step(n_host_experts=n_experts, n_host_rows=n_rows, host_us=host_us(n_experts, n_rows, 200, 60))
    assert graph.cost.load_us[0] == pytest.approx(200, rel=0.05)
    assert graph.cost.row_us[0] == pytest.approx(60, rel=0.1)


def test_host_fit_shrugs_off_an_outlier() -> None:
    graph = Graph()
    for step in range(40):
        slow = 50.0 if step == 30 else 1.0  # a thread was descheduled
        graph.step(
            n_host_experts=[1, 2, 3, 4],
            n_host_rows=[1, 3, 4, 6],
            host_us=[slow * 110 * n for n in (1, 2, 3, 4)],
        )
    total = graph.cost.load_us[0] * 4 + graph.cost.row_us[0] * 6
    assert total == pytest.approx(440, rel=0.1)


def test_unit_times_never_fall_below_zero() -> None:
    graph = Graph()
    for _ in range(5):  # the more rows, the less time: nonsense, but measured
        graph.step(n_host_experts=[1, 1, 1, 1], n_host_rows=[1, 4, 8, 16], host_us=[400, 300, 200, 100])
    assert graph.cost.load_us[0] > 0
    assert graph.cost.row_us[0] >= 0


def test_groups_are_fitted_apart() -> None:
    graph = Graph(group=[0, 0, 1, 1])
    for _ in range(10):
        graph.step(n_host_experts=2, n_host_rows=2, host_us=[220, 220, 440, 440])
    load, row, _ = graph.cost.layer_units()
    assert load + row == pytest.approx([110, 110, 220, 220])


def test_in_graph_device_times_are_read_and_rule_out_balancing() -> None:
    graph = Graph(is_in_graph=True)
    graph.step(
        n_host_experts=1, n_host_rows=1, host_us=100, n_device_experts=4, n_timed_calls=1, n_timed_experts=4,
        device_us=60, layer_us=200,
    )  # fmt: skip
    assert graph.cost.device_us[0] == pytest.approx(15)
    assert not graph.cost.is_balanceable  # host and device take turns on the same cores


@pytest.mark.parametrize("every", [1, 4])
def test_a_device_s_own_times_are_read_where_the_host_hides_them(every: int) -> None:
    """200 us an expert on the host, 30 + 5 on the device: layers say nothing of it, the engine does."""
    graph, rng = Graph(), np.random.default_rng(2)
    for step in range(40):
        n_host, n_device = rng.integers(1, 5, N_LAYER), rng.integers(0, 9, N_LAYER)
        device_us = (30 + 5 * n_device) * (20 if step == 30 else 1)  # a thread was descheduled
        is_timed = step % every == 0
        graph.step(
            n_host_experts=n_host.tolist(), n_host_rows=n_host.tolist(), host_us=(200 * n_host).tolist(),
            n_device_experts=n_device.tolist(), layer_us=(50 + 200 * n_host).tolist(),
            n_timed_calls=is_timed, n_timed_experts=(n_device * is_timed).tolist(),
            device_us=(device_us * is_timed).tolist(),
        )  # fmt: skip
    assert graph.cost.is_balanceable
    assert graph.cost.device_us[0] == pytest.approx(5, rel=0.3)
    assert graph.cost.layer_rests()[0] == pytest.approx(30, rel=0.3)


@pytest.mark.parametrize("phase", range(8))
def test_a_device_timed_in_one_forward_of_eight(phase: int) -> None:
    """Whichever forwards these are; it is slower in the second half."""
    graph, rng = Graph(), np.random.default_rng(2)
    for step in range(400):
        n_device = rng.integers(1, 9, N_LAYER) * (step % 8 == phase)
        device_us = n_device * (5 if step < 200 else 50)
        graph.step(n_host_experts=1, n_host_rows=1, host_us=100, n_timed_calls=step % 8 == phase,
                   n_timed_experts=n_device.tolist(), device_us=device_us.tolist())  # fmt: skip
        if step == 190:
            assert graph.cost.device_us[0] == pytest.approx(5, rel=0.01)
    assert graph.cost.device_us[0] > 15  # 25 of these later


def test_calls_that_are_all_alike_give_a_ratio() -> None:
    graph = Graph()
    for _ in range(3):
        graph.step(n_host_experts=1, n_host_rows=1, host_us=100, n_device_experts=4, n_timed_calls=1,
                   n_timed_experts=4, device_us=60)  # fmt: skip
    assert graph.cost.device_us[0] == pytest.approx(15)
    assert graph.cost.device_rest_us[0] == 0


def executor_steps(graph: Graph, load_us: float, device_us: float, n_steps: int = 20) -> None:
    """Layers of an executor: rest + max(host, device); rest grows from step to step, as with the context."""
    rng = np.random.default_rng(3)
    for step in range(n_steps):
        n_host, n_device = rng.integers(1, 9, N_LAYER), rng.integers(1, 9, N_LAYER)
        layer_us = 50.0 + 5.0 * step + np.maximum(n_host * load_us, n_device * device_us)
        layer_us[-1] = 0.0  # nobody sees the last layer end
        graph.step(
            n_host_experts=n_host.tolist(), n_host_rows=n_host.tolist(), host_us=(n_host * load_us).tolist(),
            n_device_experts=n_device.tolist(), layer_us=layer_us.tolist(),
        )  # fmt: skip


def test_a_device_that_holds_up_layers_is_measured() -> None:
    graph = Graph()
    executor_steps(graph, load_us=10, device_us=100)  # capped at the host's time per expert
    assert graph.cost.device_us[0] == pytest.approx(graph.cost.load_us[0])
    graph = Graph()
    executor_steps(graph, load_us=40, device_us=30)
    assert 5 < graph.cost.device_us[0] < 40  # only some layers show it: between 0 and the true 30
    assert graph.cost.is_balanceable


def test_a_device_that_waits_for_the_host_costs_nothing_more() -> None:
    graph = Graph()
    executor_steps(graph, load_us=200, device_us=5)
    assert graph.cost.device_us[0] < 10


def test_link_and_budget() -> None:
    # 2 MB in 1,000 us: 0.0005 us per byte. A step of 4 layers x 500 us = 2,000 us; half of it copies 2 MB.
    graph = Graph()
    graph.board.counters["loaded_bytes"] += np.uint64(2_000_000)
    graph.board.counters["load_us"] += np.uint64(1_000)
    graph.step(n_host_experts=1, n_host_rows=1, host_us=100, layer_us=500)
    assert graph.cost.link_us_per_byte() == pytest.approx(0.0005)
    assert graph.cost.step_budget_bytes(0.5) == 2_000_000


def test_known_link_serves_until_measured() -> None:
    assert Graph(link_gb_s=10.0).cost.link_us_per_byte() == pytest.approx(1e-4)


def test_step_time_comes_from_records_where_there_are_any() -> None:
    graph = Graph(link_gb_s=1.0)
    graph.board.record_step(StepRecord(draft_us=400, verify_us=600))
    graph.step(n_host_experts=1, n_host_rows=1, host_us=100, layer_us=200)
    assert (graph.cost.step_us, graph.cost.draft_us) == (1000, 400)


def test_idle_steps_change_nothing() -> None:
    graph = Graph()
    before = graph.cost.load_us.copy()
    graph.cost.update(graph.drain.drain())
    assert np.array_equal(graph.cost.load_us, before)
    assert not graph.cost.is_host_measured.any()
