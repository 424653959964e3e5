"""What `lossy` leaves out: nothing where all of a token's experts are kept, or all are there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import gguf_models as models
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from llama_helpers import (
    Sequence0,
    assert_same_bits,
    attached_engine,
    decide_all,
    decide_randomly,
    decode,
    loaded_model,
    new_context,
    place,
    split_layers,
)

from pyspac.engine.board_figures import router_weight_kept
from pyspac.engine.engine import Engine
from pyspac.engine.params import EngineParams
from pyspac.errors import EngineError

NAME = "qwen3moe"
N_USED = models.ARCHITECTURES[NAME].shape.n_expert_used
WIDTHS = (1, 2, 5, 9, 16)
PROMPT = 40  # more than max_batch
IN_GRAPH, EXECUTOR = {"host_mode": "in-graph"}, {"host_mode": "executor"}
OWN_KERNELS = IN_GRAPH | {"host_kernels": "spac"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path = tmp_path_factory.mktemp("lossy") / "model.gguf"
    with loaded_model(models.write_model(path, NAME, ((Type.Q8_0,) * 3,))) as model:
        yield model


@contextmanager
def two(model: Any, first: dict[str, Any], second: dict[str, Any]) -> Iterator[tuple[Any, Any, Engine]]:
    """Two contexts, the second's engine beside them; {}: llama.cpp without an engine."""
    with (
        new_context(model) as a,
        new_context(model) as b,
        attached_engine(b, **second) as engine,
    ):
        if first:
            with attached_engine(a, **first):
                yield a, b, engine
        else:
            yield a, b, engine


def engine_params(**fields: Any) -> EngineParams:
    return EngineParams(**({"device": "cpu", "cache": "50%"} | fields))


def n_left_out(engine: Engine) -> int:
    engine.end_forward()
    return int(engine.board.counters["n_left_out_rows"][0])


@pytest.mark.parametrize("way", [IN_GRAPH, EXECUTOR], ids=["in-graph", "executor"])
def test_all_of_a_tokens_experts_kept_is_exact(model: Any, way: dict[str, Any]) -> None:
    tokens, rng = Sequence0(1, models.N_VOCAB), np.random.default_rng(2)
    with two(model, {}, way | {"lossy": f"drop:{N_USED}"}) as (stock, split, engine):
        for width in (PROMPT, *WIDTHS, *WIDTHS):
            decide_randomly(engine, rng)
            place(engine)
            batch = tokens.next_batch(width)
            assert_same_bits(decode(split, batch), decode(stock, batch), f"{width} tokens")
        assert n_left_out(engine) == 0
        assert router_weight_kept(engine.board) == 1.0


def test_what_is_on_the_device_is_computed(model: Any) -> None:
    tokens = Sequence0(3, models.N_VOCAB)
    with two(model, {}, EXECUTOR | {"cache": "100%", "lossy": "drop:1"}) as (stock, split, engine):
        decide_all(engine)
        place(engine)
        for width in WIDTHS:
            batch = tokens.next_batch(width)
            assert_same_bits(decode(split, batch), decode(stock, batch), f"{width} tokens")
        assert n_left_out(engine) == 0


@pytest.mark.parametrize("way", [IN_GRAPH, EXECUTOR, OWN_KERNELS], ids=["in-graph", "executor", "own"])
def test_with_an_empty_device_only_the_best_are_computed(model: Any, way: dict[str, Any]) -> None:
    tokens = Sequence0(5, models.N_VOCAB)
    with two(model, {}, way | {"lossy": "drop:1"}) as (stock, split, engine):
        prompt = tokens.next_batch(PROMPT)
        assert_same_bits(decode(split, prompt), decode(stock, prompt), "a prompt is exact")
        n_tokens = 0
        for width in WIDTHS:
            batch = tokens.next_batch(width)
            found, exact = decode(split, batch), decode(stock, batch)
            assert np.isfinite(found).all()
            assert np.abs(found - exact).max() > 1e-3
            n_tokens += width
        n_layers = len(split_layers(engine))
        assert n_left_out(engine) == n_tokens * (N_USED - 1) * n_layers
        stats = engine.board.layer_stats[split_layers(engine)]
        assert (stats["n_host_rows"] == n_tokens).all()
        kept = router_weight_kept(engine.board)
        assert kept is not None
        assert 1 / N_USED <= kept < 1.0


def test_both_ways_leave_out_the_same(model: Any) -> None:
    tokens = Sequence0(7, models.N_VOCAB)
    with two(model, IN_GRAPH | {"lossy": "drop:2"}, EXECUTOR | {"lossy": "drop:2"}) as (a, b, engine):
        for width in WIDTHS:
            batch = tokens.next_batch(width)
            assert_same_bits(decode(a, batch), decode(b, batch), f"{width} tokens")
        assert n_left_out(engine) > 0


@pytest.mark.parametrize("rule", ["drop:1", "substitute:1", "route:1"])
def test_the_host_takes_over_what_a_slow_device_holds(model: Any, rule: str) -> None:
    """Which changes nothing of what is left out."""
    fast = EXECUTOR | {"lossy": rule, "host_kernels": "ggml"}
    tokens, rng = Sequence0(15, models.N_VOCAB), np.random.default_rng(16)
    with (
        new_context(model) as a,
        new_context(model) as b,
        attached_engine(a, **fast) as quick,
        attached_engine(b, **fast, device="emulated:0.02") as slow,
    ):
        for width in WIDTHS * 8:
            states = rng.bit_generator.state
            for engine in (quick, slow):
                rng.bit_generator.state = states
                decide_randomly(engine, rng)
                place(engine)
            batch = tokens.next_batch(width)
            assert_same_bits(decode(b, batch), decode(a, batch), f"{width} tokens")
        assert n_left_out(quick) == n_left_out(slow) > 0 or rule == "route:1"
        assert router_weight_kept(quick.board) == router_weight_kept(slow.board) < 1
        n_host = [int(e.board.layer_stats["n_host_rows"].sum()) for e in (quick, slow)]
    assert n_host[1] > 1.2 * n_host[0]


@pytest.mark.parametrize("way", [IN_GRAPH, EXECUTOR], ids=["in-graph", "executor"])
def test_without_tolerance_nothing_stands_in(model: Any, way: dict[str, Any]) -> None:
    tokens, rng = Sequence0(11, models.N_VOCAB), np.random.default_rng(12)
    with two(model, {}, way | {"lossy": "substitute:0"}) as (stock, split, engine):
        for width in (PROMPT, *range(1, 17), *WIDTHS):
            decide_randomly(engine, rng)
            place(engine)
            batch = tokens.next_batch(width)
            assert_same_bits(decode(split, batch), decode(stock, batch), f"{width} tokens")
        assert n_left_out(engine) == 0
        assert router_weight_kept(engine.board) == 1.0


def test_the_same_stand_in_with_other_kernels(model: Any) -> None:
    """Which round otherwise."""
    tokens, n_alike = Sequence0(13, models.N_VOCAB), 0
    with ExitStack() as stack:
        pairs = [
            (
                ctx,
                stack.enter_context(attached_engine(ctx, **way, lossy="substitute:1")),
                np.random.default_rng(14),
            )
            for way in (IN_GRAPH, OWN_KERNELS)
            for ctx in [stack.enter_context(new_context(model))]
        ]
        for width in (*WIDTHS, *WIDTHS):
            batch = tokens.next_batch(width)
            found = []
            for ctx, engine, rng in pairs:
                decide_randomly(engine, rng)
                place(engine)
                found.append(decode(ctx, batch))
            n_alike += bool(np.corrcoef(found[0].ravel(), found[1].ravel())[0, 1] > 0.99)
        assert n_left_out(pairs[0][1]) > 0
    assert n_alike >= 2 * len(WIDTHS) - 1


def test_more_stand_in_the_more_is_tolerated(model: Any) -> None:
    kept, host_rows = [], []
    for tolerance in (0, 0.02, 1):
        tokens, rng = Sequence0(13, models.N_VOCAB), np.random.default_rng(14)
        with two(model, {}, EXECUTOR | {"lossy": f"substitute:{tolerance}"}) as (_, split, engine):
            for width in (*WIDTHS, *WIDTHS):
                decide_randomly(engine, rng)
                place(engine)
                assert np.isfinite(decode(split, tokens.next_batch(width))).all()
            assert (n_left_out(engine) > 0) == (tolerance > 0)
            kept.append(router_weight_kept(engine.board))
            host_rows.append(int(engine.board.layer_stats["n_host_rows"].sum()))
            assert engine.board.counters["n_pinned_steals"][0] == 0
    assert kept[0] == 1.0 > kept[1] > kept[2]
    assert host_rows[0] > host_rows[1] > host_rows[2] > 0


@pytest.mark.parametrize("way", [IN_GRAPH, EXECUTOR, OWN_KERNELS], ids=["in-graph", "executor", "own"])
def test_a_strength_of_0_is_exact(model: Any, way: dict[str, Any]) -> None:
    tokens, rng = Sequence0(15, models.N_VOCAB), np.random.default_rng(16)
    # own kernels round in their own way, on both sides
    with two(model, way if way is OWN_KERNELS else {}, way | {"lossy": "route:0"}) as (stock, split, engine):
        for width in (PROMPT, *range(1, 17), *WIDTHS):
            decide_randomly(engine, rng)
            place(engine)
            batch = tokens.next_batch(width)
            assert_same_bits(decode(split, batch), decode(stock, batch), f"{width} tokens")
        assert n_left_out(engine) == 0
        assert router_weight_kept(engine.board) == 1.0


# weights as they come, normalised, scaled, by softmax over the chosen, by a sigmoid; two sets of experts
@pytest.mark.parametrize("name", ["qwen2moe", "mixtral", "deepseek", "gpt-oss", "llama4", "granitemoe"])
def test_weights_are_the_routers_own(name: str, tmp_path: Path) -> None:
    path = models.write_model(tmp_path / "model.gguf", name, ((Type.Q8_0,) * 3,))
    tokens, rng = Sequence0(21, models.N_VOCAB), np.random.default_rng(22)
    with (
        loaded_model(path) as model,
        two(model, {}, EXECUTOR | {"lossy": "route:0"}) as (stock, split, engine),
    ):
        for width in (PROMPT, *WIDTHS):
            decide_randomly(engine, rng)
            place(engine)
            batch = tokens.next_batch(width)
            assert_same_bits(decode(split, batch), decode(stock, batch), f"{width} tokens")


@pytest.mark.parametrize("name", ["deepseek3", "glm4moe"])
def test_routers_with_a_bias_for_the_choice_are_refused(name: str, tmp_path: Path) -> None:
    path = models.write_model(tmp_path / "model.gguf", name, ((Type.Q8_0,) * 3,))
    with (
        loaded_model(path) as model,
        new_context(model) as ctx,
        pytest.raises(EngineError, match="choose by their logits only"),
    ):
        Engine.attach(ctx, engine_params(lossy="route:0.2"))


@pytest.mark.parametrize("all_there", [True, False])
def test_no_expert_is_preferred_where_all_are_alike(model: Any, all_there: bool) -> None:
    tokens = Sequence0(17, models.N_VOCAB)
    with two(model, {}, EXECUTOR | {"cache": "100%", "lossy": "route:1"}) as (stock, split, engine):
        if all_there:
            decide_all(engine)
            place(engine)
        for width in WIDTHS:
            batch = tokens.next_batch(width)
            assert_same_bits(decode(split, batch), decode(stock, batch), f"{width} tokens")


def test_more_are_found_the_more_they_are_preferred(model: Any) -> None:
    kept, host_rows = [], []
    for strength in (0, 0.2, 1):
        tokens, rng = Sequence0(19, models.N_VOCAB), np.random.default_rng(20)
        with two(model, {}, EXECUTOR | {"lossy": f"route:{strength}"}) as (stock, split, engine):
            prompt = tokens.next_batch(PROMPT)
            assert_same_bits(decode(split, prompt), decode(stock, prompt), "a prompt is exact")
            for width in (*WIDTHS, *WIDTHS):
                decide_randomly(engine, rng)
                place(engine)
                assert np.isfinite(decode(split, tokens.next_batch(width))).all()
            engine.end_forward()
            kept.append(router_weight_kept(engine.board))
            host_rows.append(int(engine.board.layer_stats["n_host_rows"].sum()))
    assert kept[0] == 1.0 > kept[1] > kept[2]
    assert host_rows[0] > host_rows[1] > host_rows[2] >= 0


def test_without_it_nothing_is_weighed(model: Any) -> None:
    with two(model, {}, EXECUTOR) as (_, split, engine):
        decode(split, Sequence0(9, models.N_VOCAB).next_batch(5))
        assert n_left_out(engine) == 0
        assert router_weight_kept(engine.board) is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        *((text, r"give drop:N \([^()]*\)$") for text in ("drop:0", "drop", "drop:2x")),
        ("lowbit:1", r"give lowbit:N:FILE \([^()]*\)$"),
        *((text, r"give substitute:X \([^()]*\)$") for text in ("substitute:2", "substitute")),
        ("route:2", r"give route:X \([^()]*\)$"),
        ("keep:2", r"give drop:N .*, or lowbit:N:FILE .*, or substitute:X .*, or route:X "),
    ],
)
def test_what_is_no_rule_is_refused(model: Any, text: str, says: str) -> None:
    """With the form of its kind, or of all kinds."""
    with new_context(model) as ctx, pytest.raises(EngineError, match=says):
        Engine.attach(ctx, engine_params(lossy=text))


def test_without_a_device_every_expert_is_there(model: Any) -> None:
    with new_context(model) as ctx, pytest.raises(EngineError, match="needs a device, or experts on disk"):
        Engine.attach(ctx, engine_params(device="none", cache="0", lossy="drop:2"))
