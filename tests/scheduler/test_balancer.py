"""Step 3: tau per layer."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyspac.engine.board import BoardGeometry, LocalBoard, Residency
from pyspac.scheduler.balancer import Balancer, LevelTables, choose_threshold
from pyspac.scheduler.config import SchedulerConfig
from pyspac.scheduler.cost_model import CostModel
from pyspac.scheduler.occupancy import Occupancy


def test_choose_threshold_by_hand() -> None:
    # tau        1   2   3   4
    # t_cpu     10  20  30  40
    # t_gpu     50  35  28   5
    # distance  40  15   2  35: tau = 3; without it, tau = 2; with nothing feasible, tau = K = 4
    # (columns run from tau = 4 down)
    t_cpu, t_gpu = np.array([[40.0, 30, 20, 10]] * 3), np.array([[5.0, 28, 35, 50]] * 3)
    feasible = np.array([[1, 1, 1, 1], [1, 0, 1, 1], [0, 0, 0, 0]], bool)
    assert choose_threshold(t_cpu, t_gpu, feasible).tolist() == [3, 2, 4]


def equation_39(t_cpu: list[float], t_gpu: list[float], tau_min: int, tau_max: int) -> float:
    """The least |t_cpu - t_gpu| over the paper's four candidates, the crossing by linear interpolation."""
    d = [c - g for c, g in zip(t_cpu, t_gpu, strict=True)]
    crossing = 1.0 if d[0] >= 0 else float(len(d))
    for i in range(len(d) - 1):
        if d[i] < 0 <= d[i + 1]:
            crossing = i + 1 + d[i] / (d[i] - d[i + 1])
    candidates = {tau_min, tau_max, math.floor(crossing), math.ceil(crossing)}
    return min(abs(d[tau - 1]) for tau in candidates if tau_min <= tau <= tau_max)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000)), min_size=1, max_size=12),
    st.data(),
)
def test_choose_threshold_equals_equation_39(steps: list[tuple[int, int]], data: st.DataObject) -> None:
    t_cpu = np.cumsum([float(c) for c, _ in steps])
    t_gpu = np.cumsum([float(g) for _, g in steps])[::-1].copy()
    k = len(steps)
    tau_min = data.draw(st.integers(1, k))
    tau_max = data.draw(st.integers(tau_min, k))
    feasible = (np.arange(1, k + 1) >= tau_min) & (np.arange(1, k + 1) <= tau_max)
    tau = int(choose_threshold(t_cpu[None, ::-1], t_gpu[None, ::-1], feasible[None, ::-1])[0])
    assert tau_min <= tau <= tau_max
    assert abs(t_cpu[tau - 1] - t_gpu[tau - 1]) == equation_39(
        t_cpu.tolist(), t_gpu.tolist(), tau_min, tau_max
    )


def test_tables_of_the_papers_example() -> None:
    # MoE-SpAc C.1: two draft tokens pick {0, 3} and {2, 3}; only expert 3 is hot (level 4 >= tau = 3).
    # Four activations, two of them cold: r_c = 1 - 2/4. Three distinct experts, one hot: r_g = 1/3.
    tables = LevelTables(1, 4, 4)
    tables.place(np.array([[1, 0, 2, 4]], np.uint8))
    tables.observe(np.array([[1, 0, 1, 2]], np.uint32))
    rows_hot, used_hot = np.cumsum(tables.rows[0]), np.cumsum(tables.used[0])  # columns: levels 4 3 2 1 0
    assert 1 - rows_hot[1] / rows_hot[4] == 1 - 2 / 4
    assert used_hot[1] / used_hot[4] == pytest.approx(1 / 3)


def test_use_probability_never_falls_with_the_level() -> None:
    rng = np.random.default_rng(0)
    tables = LevelTables(3, 20, 6)
    for _ in range(10):
        tables.place(rng.integers(0, 7, (3, 20)).astype(np.uint8))
        tables.observe(rng.integers(0, 3, (3, 20)).astype(np.uint32))
    probability = tables.use_probability()
    assert np.all(np.diff(probability) >= 0)
    assert 0 <= probability[0] <= probability[-1] <= 1


def make(
    n_layer: int = 2, n_expert: int = 6, n_slots: int = 4, group: list[int] | None = None, **config: object
) -> tuple[LocalBoard, Balancer]:
    group = group or [0] * n_layer
    board = LocalBoard(
        BoardGeometry(
            n_layer=n_layer, n_expert=n_expert, n_expert_used=2, expert_bytes=[1000] * n_layer,
            group=group, group_slots=[n_slots] * n_layer,
        )
    )  # fmt: skip
    settings = SchedulerConfig(**{"estimator": "spac", **config})  # type: ignore[arg-type]
    return board, Balancer(board, settings, CostModel(board))


def observe(balancer: Balancer, levels: np.ndarray, counts: np.ndarray) -> None:
    balancer.tables.place(levels)
    balancer.observe(counts)


def solve(balancer: Balancer, levels: np.ndarray, board: LocalBoard) -> np.ndarray:
    return balancer.solve(levels, Occupancy(board).read(board.residency))


def solve_tables(balancer: Balancer, levels: np.ndarray, board: LocalBoard) -> np.ndarray:
    """The solution before free slots are dealt with."""
    balancer.tables.place(levels)
    return balancer.solve_tables(balancer.absent_hot(Occupancy(board).read(board.residency)))


LEVELS = np.array([[4, 4, 3, 2, 1, 0], [3, 1, 1, 1, 0, 0]], np.uint8)


def test_slots_alone_decide_until_costs_are_known() -> None:
    # experts at >= 4: 2; >= 3: 4; >= 2: 5. Four slots for both layers: tau = 3, for every layer of the group.
    board, balancer = make()
    board.residency[:] = np.where(LEVELS >= 3, Residency.RESIDENT, Residency.ABSENT)
    assert solve(balancer, LEVELS, board).tolist() == [3, 3]
    assert not balancer.is_balanced


def test_free_slots_lower_tau_by_one() -> None:
    # five slots: >= 2 has 5 experts and fits exactly. Six slots: five held or wanted, one left over: tau = 1,
    # whose nine experts the plan cuts at the sixth.
    board, balancer = make(n_slots=5)
    assert solve(balancer, LEVELS, board).tolist() == [2, 2]
    board, balancer = make(n_slots=6)
    assert solve(balancer, LEVELS, board).tolist() == [1, 1]
    board.residency[0] = Residency.RESIDENT  # six slots held: no room, even if the wrong ones hold them
    assert solve(balancer, LEVELS, board).tolist() == [2, 2]


def test_free_slots_may_stay_free() -> None:
    board, balancer = make(n_slots=6)
    balancer.uses_free_slots = False
    assert solve(balancer, LEVELS, board).tolist() == [2, 2]


def test_groups_have_their_own_slots() -> None:
    board, balancer = make(group=[0, 1], n_slots=2)
    board.residency[:, :2] = Residency.RESIDENT
    assert solve(balancer, LEVELS, board).tolist() == [4, 2]


def test_tau_is_k_when_nothing_fits() -> None:
    board, balancer = make(n_slots=1)
    assert solve(balancer, LEVELS, board).tolist() == [4, 4]


@pytest.mark.parametrize(("config", "tau"), [({"threshold": 3}, 3), ({"without": {"hetwb"}}, 2)])
def test_fixed_thresholds(config: dict[str, object], tau: int) -> None:
    board, balancer = make(**config)
    assert solve(balancer, LEVELS, board).tolist() == [tau, tau]


def measured(
    balancer: Balancer, load_us: float, device_us: float, link_us_per_byte: float | None = None
) -> None:
    """Pretend that costs were measured; rows are free."""
    cost = balancer.cost
    cost.load_us[:], cost.row_us[:], cost.device_us[:] = load_us, 0.0, device_us
    cost.is_host_measured[:] = cost.is_device_measured[:] = True
    cost._link_known = link_us_per_byte


def test_a_slow_device_raises_tau() -> None:
    # One layer, one expert of each level 1 .. 4 in use, plenty of slots. Host 100 us per expert, device 100
    # us:
    #   tau        1    2    3    4
    #   T_cpu      0  100  200  300
    #   T_gpu    400  300  200  100   -> equal at tau = 3. A device ten times as fast: 0 vs 40 at tau = 1.
    levels = np.array([[4, 3, 2, 1, 0, 0]], np.uint8)
    board, balancer = make(n_layer=1, n_slots=6)
    board.residency[:] = Residency.RESIDENT
    observe(balancer, levels, np.array([[1, 1, 1, 1, 0, 0]], np.uint32))
    measured(balancer, 100, 100)
    assert solve(balancer, levels, board).tolist() == [3]
    assert balancer.is_balanced
    measured(balancer, 100, 10)
    assert solve(balancer, levels, board).tolist() == [1]


@pytest.mark.parametrize(
    ("estimator", "resident", "tau"),
    [
        ("ema", [], 3),  # as above
        # level 1 is there and in use: 200 us on the device at tau = 4, and on the host, too
        ("ema", [3], 4),
        ("ema", [2, 3], 4),  # more than enough
        ("ema", [4, 5], 3),  # nobody uses these
        ("spac", [2, 3], 3),  # the paper's equations: hot experts only
    ],
)
def test_what_the_device_holds_need_not_be_copied(estimator: str, resident: list[int], tau: int) -> None:
    levels = np.array([[4, 3, 2, 1, 0, 0]], np.uint8)
    board, balancer = make(n_layer=1, n_slots=6, estimator=estimator, n_levels=4)
    balancer.uses_free_slots = False
    board.residency[0, resident] = Residency.RESIDENT
    observe(balancer, levels, np.array([[1, 1, 1, 1, 0, 0]], np.uint32))
    measured(balancer, 100, 100)
    assert solve(balancer, levels, board).tolist() == [tau]


def test_the_link_bounds_tau_from_below() -> None:
    # As above with the fast device, but three of the four are absent; a copy takes 250 us (1,000 bytes).
    #   tau     1    2    3    4
    #   n       3    2    1    0
    #   copies 750  500  250    0
    #   window  40  100  200  300   -> only tau = 4 is feasible (spac rations layer by layer)
    levels = np.array([[4, 3, 2, 1, 0, 0]], np.uint8)
    board, balancer = make(n_layer=1, n_slots=6)
    board.residency[0] = [3, 0, 0, 0, 3, 3]
    observe(balancer, levels, np.array([[1, 1, 1, 1, 0, 0]], np.uint32))
    measured(balancer, 100, 10, link_us_per_byte=0.25)
    balancer.cost.draft_us = 0.0
    tau = int(solve_tables(balancer, levels, board)[0])
    assert tau == 4
    balancer.cost.draft_us = 100.0  # drafting gives the link 100 us more: 250 <= 200 + 100 at tau = 3
    assert int(solve_tables(balancer, levels, board)[0]) == 3


def test_a_layer_that_wants_less_leaves_its_slots_to_others() -> None:
    # Layer 0 has experts in use at all levels, layer 1 none: with equal speeds layer 0 wants tau = 3 (two
    # experts), so five slots suffice for layer 1 down to level 1.
    levels = np.array([[4, 3, 2, 1, 0, 0], [4, 2, 1, 0, 0, 0]], np.uint8)
    board, balancer = make(n_layer=2, n_slots=5)
    board.residency[:, :3] = Residency.RESIDENT
    observe(balancer, levels, np.array([[1, 1, 1, 1, 0, 0], [0] * 6], np.uint32))
    measured(balancer, 100, 100)
    tau = solve(balancer, levels, board)
    assert tau[0] == 3
    hot = (levels >= tau[:, None]).sum()
    assert hot <= 5


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 60), st.integers(1, 16), st.booleans())
def test_hot_experts_fit_the_slots_or_tau_is_k(
    seed: int, n_slots: int, n_levels: int, is_measured: bool
) -> None:
    rng = np.random.default_rng(seed)
    board, balancer = make(
        n_layer=4, n_expert=10, group=[0, 1, 0, 1], n_slots=n_slots, estimator="ema", n_levels=n_levels
    )
    levels = rng.integers(0, n_levels + 1, (4, 10)).astype(np.uint8)
    observe(balancer, levels, rng.integers(0, 3, (4, 10)).astype(np.uint32))
    if is_measured:
        measured(balancer, 100, float(rng.uniform(1, 200)), 0.1)
    tau = solve_tables(balancer, levels, board)
    assert tau.min() >= 1
    assert tau.max() <= n_levels
    for layers in ([0, 2], [1, 3]):
        n_hot = int((levels[layers] >= tau[layers][:, None]).sum())
        assert n_hot <= n_slots or tau[layers].max() == n_levels


def test_sums_of_unused_levels_end_at_zero() -> None:
    """Denormal numbers take many times as long to multiply."""
    tables = LevelTables(1, 2, 4)
    for step in range(15_000):
        tables.place(np.array([[4 if step == 0 else 1, 0]], np.uint8))
        tables.observe(np.array([[1, 0]], np.uint32))
    assert tables.used[0, 0] == 0.0  # level 4
    assert tables.used[0, 3] == pytest.approx(1 / (1 - 0.95**4))  # level 1, from every fourth step
