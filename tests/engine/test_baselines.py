"""Policies to compare with (EVICTION+MISS): the same bits, whoever comes and goes, and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import gguf_models as models
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from llama_helpers import Sequence0, assert_same_bits, attached_engine, decode, loaded_model, new_context

from pyspac.engine.board_figures import router_weight_kept
from pyspac.engine.engine import Engine
from pyspac.engine.params import EngineParams
from pyspac.errors import EngineError

NAME = "qwen3moe"
N_USED = models.ARCHITECTURES[NAME].shape.n_expert_used
PROMPT = 40  # more than max_batch
WIDTHS = (PROMPT, *range(1, 17), 1, 1, 1)
WAYS: dict[str, dict[str, Any]] = {
    "in-graph": {"host_mode": "in-graph"},
    "executor": {"host_mode": "executor"},
    "own": {"host_mode": "in-graph", "host_kernels": "spac"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path = tmp_path_factory.mktemp("baselines") / "model.gguf"
    with loaded_model(models.write_model(path, NAME, ((Type.Q8_0,) * 3,))) as model:
        yield model


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "baseline", ["lru+fetch", "score+fetch", "least-stale:cyclic=1+balance", "lfu+host-admit", "ema+fetch"]
)
def test_bits_stay_the_same(model: Any, baseline: str, way: str) -> None:
    tokens = Sequence0(1, models.N_VOCAB)
    params = WAYS[way] | {"cache": "40%"}
    with ExitStack() as stack:
        plain, split = (stack.enter_context(new_context(model)) for _ in range(2))
        if way == "own":  # other kernels than llama.cpp's
            stack.enter_context(attached_engine(plain, **params))
        engine = stack.enter_context(attached_engine(split, **params, baseline=baseline))
        for width in WIDTHS:
            batch = tokens.next_batch(width)
            assert_same_bits(decode(split, batch), decode(plain, batch), f"{width} tokens")
        engine.end_forward()
        counters = engine.board.counters[0]
        assert counters["n_loads"] > 0
        assert counters["n_evictions"] > 0
        assert counters["n_pinned_steals"] == 0


def test_copies_are_waited_for(model: Any) -> None:
    """On a slow link: where there are slots for all that a layer asks for, the host has nothing to do."""
    tokens = Sequence0(2, models.N_VOCAB)
    params = {"cache": "60%", "baseline": "lru+fetch", "copy_gb_s": 0.05}
    with new_context(model) as split, attached_engine(split, **params) as engine:
        for _ in range(6):
            decode(split, tokens.next_batch(1))
        engine.end_forward()
        assert engine.board.counters["n_loads"][0] == engine.board.counters["n_miss"][0] > 0
        assert engine.board.layer_stats["n_host_experts"].sum() == 0


@pytest.mark.parametrize("lossy", [f"drop:{N_USED}", "substitute:0", "route:0"])
def test_a_rule_of_no_strength_is_exact(model: Any, lossy: str) -> None:
    tokens = Sequence0(5, models.N_VOCAB)
    with ExitStack() as stack:
        plain, split = (stack.enter_context(new_context(model)) for _ in range(2))
        engine = stack.enter_context(attached_engine(split, cache="40%", baseline="lru+fetch", lossy=lossy))
        for width in WIDTHS:
            batch = tokens.next_batch(width)
            assert_same_bits(decode(split, batch), decode(plain, batch), f"{width} tokens")
        engine.end_forward()
        assert engine.board.counters["n_loads"][0] > 0
        assert engine.board.counters["n_left_out_rows"][0] == 0


@pytest.mark.parametrize("kind", ["drop:{}", "substitute:{}", "route:{}"])
def test_what_is_left_out_is_not_copied(model: Any, kind: str) -> None:
    """The more may be left out, the fewer copies are waited for; nor does the host compute it instead."""
    n_loads, kept = [], []
    for strength in {"drop:{}": (N_USED, 1), "substitute:{}": (0, 1), "route:{}": (0, 1)}[kind]:
        tokens = Sequence0(6, models.N_VOCAB)
        params = {"cache": "60%", "baseline": "lru+fetch", "lossy": kind.format(strength)}
        with new_context(model) as split, attached_engine(split, **params) as engine:
            for _ in range(20):
                assert np.isfinite(decode(split, tokens.next_batch(1))).all()
            engine.end_forward()
            n_loads.append(int(engine.board.counters["n_loads"][0]))
            kept.append(router_weight_kept(engine.board))
            assert engine.board.layer_stats["n_host_experts"].sum() == 0
            assert engine.board.counters["n_pinned_steals"][0] == 0
    assert n_loads[0] > n_loads[1]
    assert kept[0] == 1.0 > kept[1]


def test_what_is_decided_moves_nothing(model: Any) -> None:
    """Nor does it where the scheduler is in another process."""
    with new_context(model) as ctx, attached_engine(ctx, cache="60%", baseline="lru+fetch") as engine:
        board = engine.board
        with board.decision():
            board.utility[:] = 9
            board.tau[:] = 1
            board.load[0], board.n_load[0] = 0, 1
        engine.apply()
        engine.wait_idle(5000)
        assert board.counters["n_loads"][0] == 0


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"baseline": "lru"}, "give EVICTION\\+MISS"),
        ({"baseline": "lru+fetch", "device": "none", "cache": "0"}, "needs a device"),
        ({"baseline": "lru+fetch", "next_layer": 1}, "leave out next-layer"),
        ({"baseline": "lru+fetch+per-layer", "cache": "1B"}, r"MiB in each of \d+ pools: use"),
        ({"baseline": "lru+fetch", "cache": "1B"}, r"no room for one expert of [0-9.]+ MiB: use at least"),
    ],
)
def test_what_cannot_be_is_refused(model: Any, params: dict[str, Any], says: str) -> None:
    with new_context(model) as ctx, pytest.raises(EngineError, match=says):
        Engine.attach(ctx, EngineParams(**({"device": "cpu", "cache": "50%"} | params)))
