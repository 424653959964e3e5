"""What `inspect --ram` predicts, from speeds that are given."""

from __future__ import annotations

from collections import Counter

import pytest

from pyspac.model.disk_probe import DiskSpeed
from pyspac.model.geometry import LayerGeometry, MoeGeometry
from pyspac.model.known_models import Weights
from pyspac.model.speed_forecast import Machine, decode_tps
from pyspac.model.tier_forecast import Places, forecast

MB = 10**6
DISK = DiskSpeed(
    path="f", piece_bytes=MB, is_direct=True, depth_1_gb_s=0.5, depth_32_gb_s=1.0
)  # latency 1 ms


def geometry() -> MoeGeometry:
    """Two layers of 10 experts of 4 MB, of which a token uses 2, and 30 MB besides."""
    layers = tuple(LayerGeometry(il, 10, 4 * MB, (("up", "Q8_0"),), 0, (4 * MB,)) for il in range(2))
    return MoeGeometry("test", "test", 2, 10, 2, 0, 0, 256, 512, 110 * MB, layers)


def test_what_one_read_asks_for() -> None:
    assert geometry().largest_expert_bytes == 4 * MB
    assert geometry().matrix_bytes == 4 * MB // 3


def test_beside_a_device_by_hand() -> None:
    """20 experts of 4 MB: 5 on the device, 10 of the others in memory, 5 on disk; then all fit. One slot more
    is for what passes through."""
    g = geometry()
    n_bytes = g.experts_bytes // g.n_experts_total
    assert g.n_experts_total == 20
    found = Places.of(g, 5 * n_bytes, 11 * g.slot_bytes)
    assert (found.n_on_device, found.n_in_memory, found.n_on_disk) == (5, 10, 5)
    assert Places.of(g, 7 * n_bytes, 11 * g.slot_bytes, others=2 * n_bytes).n_on_device == 5
    assert Places.of(g, n_bytes, 11 * g.slot_bytes, others=2 * n_bytes).n_on_device == 0
    found = Places.of(g, 15 * n_bytes, 11 * g.slot_bytes)
    assert (found.n_on_device, found.n_in_memory, found.n_on_disk) == (15, 5, 0)


def weights() -> Weights:
    """As `geometry`; all of one type, which no kernel has, so at memory's speed."""
    return Weights(
        name="test", quantisation="Q8_0", n_layer=2, n_layer_moe=2, n_expert=10, n_expert_used=2,
        dense=Counter({"Q8_0": 30 * MB}), output=Counter(), expert=Counter({"Q8_0": 4 * MB}), table_bytes=0,
        kv={}, query_width=0, kv_row_bytes=0,
    )  # fmt: skip


HERE = Machine(ram_bytes=0, memory_gb_s=10.0, kernels={}, disk=DISK, reached=1.0, layer_us=0.0)


def test_a_token_by_hand() -> None:
    """Memory of 10 GB/s: 3 ms for the rest. Per layer 8 MB of experts, half of them absent: 4 ms of reads,
    three quarters of the latency (one of four tokens finds both), 0.4 ms of computing beside them and as much
    of what was read."""
    assert decode_tps(weights(), HERE, 0.5) == pytest.approx(1e6 / (3000 + 2 * (4000 + 750 + 400)))
    assert decode_tps(weights(), HERE, 1.0) == pytest.approx(1e6 / (3000 + 2 * 800))


def test_what_fits_where() -> None:
    """Of 20 experts: half, and too few, as one layer needs 10."""
    g = geometry()
    half = forecast(weights(), g, 41 * MB, HERE)
    assert (half.n_in_memory, half.n_on_disk, half.other_bytes) == (10, 10, 30 * MB)
    assert half.tps_alike is not None
    assert half.tps_recorded is not None
    assert half.tps_alike == pytest.approx(decode_tps(weights(), HERE, 0.5))
    assert half.tps_recorded > half.tps_alike
    little = forecast(weights(), g, 20 * MB, HERE)
    assert (little.n_in_memory, little.tps_alike, little.tps_recorded) == (4, None, None)
    assert little.least_bytes == 10 * 978 * 4096  # 4 MB begin and end anywhere in a block
    everything = forecast(weights(), g, 80 * MB, HERE)
    assert everything.tps_alike == everything.tps_recorded == pytest.approx(1e6 / 4600)
