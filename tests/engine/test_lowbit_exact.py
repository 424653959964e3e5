"""Experts that are not there, computed from a copy in fewer bits: exact where none may be, or the copy is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from pyspac.forward.model import LAZY_MODE_EXPERTS, LOAD_MODE_NONE

NAME = "qwen3moe"
N_USED = models.ARCHITECTURES[NAME].shape.n_expert_used
PROMPT = 40  # more than max_batch
WIDTHS = (PROMPT, *range(1, 17), 1, 5, 16)
IN_GRAPH, EXECUTOR = {"host_mode": "in-graph"}, {"host_mode": "executor"}
KERNELS = {"host_kernels": "spac"}  # on both sides: lowbit needs them
WAYS = pytest.mark.parametrize("way", [IN_GRAPH, EXECUTOR], ids=["in-graph", "executor"])
RAM = 6 << 20  # of the model's 10 MiB of experts


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write_model(tmp_path_factory.mktemp("lowbit") / "model.gguf", NAME, ((Type.Q8_0,) * 3,))


@pytest.fixture(scope="module")
def same(path: Path) -> Path:
    return models.write_copy(path.with_name("same.gguf"), path)


@pytest.fixture(scope="module")
def low(path: Path) -> Path:
    return models.write_copy(path.with_name("low.gguf"), path, Type.Q4_0)


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Any]:
    with loaded_model(path) as model:
        yield model


@contextmanager
def contexts(model: Any, ways: Sequence[dict[str, Any]]) -> Iterator[list[tuple[Any, Engine]]]:
    with ExitStack() as stack:
        found = []
        for way in ways:
            ctx = stack.enter_context(new_context(model))
            found.append((ctx, stack.enter_context(attached_engine(ctx, **(KERNELS | way)))))
        yield found


def n_not_exact(engine: Engine) -> int:
    engine.end_forward()
    return int(engine.board.counters["n_left_out_rows"][0])


def kl_divergence(exact: np.ndarray, found: np.ndarray) -> float:
    """In the mean, in nats per token."""
    p, q = (x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) for x in (exact, found))
    p, q = p - exact.max(-1, keepdims=True), q - found.max(-1, keepdims=True)
    return float((np.exp(p) * (p - q)).sum(-1).mean())


@WAYS
def test_all_of_a_tokens_experts_kept_is_exact(model: Any, low: Path, way: dict[str, Any]) -> None:
    tokens, rng = Sequence0(1, models.N_VOCAB), np.random.default_rng(2)
    with contexts(model, [way, way | {"lossy": f"lowbit:{N_USED}:{low}"}]) as [(a, _), (b, engine)]:
        for width in WIDTHS:
            decide_randomly(engine, rng)
            place(engine)
            batch = tokens.next_batch(width)
            assert_same_bits(decode(b, batch), decode(a, batch), f"{width} tokens")
        assert n_not_exact(engine) == 0
        assert router_weight_kept(engine.board) == 1.0


@WAYS
@pytest.mark.parametrize("rule", ["lowbit:0:{}", "lowbit:1:{}", "lowbit:2:{}", "lowbit:1:{}:{}"])
def test_a_copy_of_the_same_weights_is_exact(model: Any, same: Path, way: dict[str, Any], rule: str) -> None:
    tokens, rng = Sequence0(3, models.N_VOCAB), np.random.default_rng(4)
    with contexts(model, [way, way | {"lossy": rule.format(same, same)}]) as [(a, _), (b, engine)]:
        for width in WIDTHS:
            decide_randomly(engine, rng)
            place(engine)
            batch = tokens.next_batch(width)
            assert_same_bits(decode(b, batch), decode(a, batch), f"{width} tokens")
        assert n_not_exact(engine) > 0
        kept = router_weight_kept(engine.board)
        assert kept is not None
        assert 0.1 < kept < 1.0


def test_what_the_last_copy_leaves_is_dropped(model: Any, same: Path) -> None:
    """The best one exactly, the next from a copy that is exact: the best two."""
    tokens = Sequence0(5, models.N_VOCAB)
    ways = [{"lossy": "drop:2"}, {"lossy": f"lowbit:1:{same}:drop"}]
    with contexts(model, [EXECUTOR | way for way in ways]) as [(a, _), (b, engine)]:
        for width in (PROMPT, *[1] * 8):
            batch = tokens.next_batch(width)
            assert_same_bits(decode(b, batch), decode(a, batch), f"{width} tokens")
        stats = engine.board.layer_stats[split_layers(engine)]
        assert (stats["n_host_rows"] == 8 * 2).all()


@WAYS
def test_fewer_bits_lie_between_exact_and_none(
    model: Any, low: Path, same: Path, way: dict[str, Any]
) -> None:
    """Of copies; and one in fewer bits for the worst experts only costs less than for all."""
    rules = ["drop:1", f"lowbit:0:{low}", f"lowbit:1:{low}", f"lowbit:1:{same}:{low}"]
    ways = [way, *[way | {"lossy": rule} for rule in rules]]
    tokens = Sequence0(7, models.N_VOCAB)
    with contexts(model, ways) as found:
        logits = []
        for width in (PROMPT, *[1] * 24):
            batch = tokens.next_batch(width)
            logits.append([decode(ctx, batch) for ctx, _ in found])
    of_each = [np.concatenate(one) for one in zip(*logits[1:], strict=True)]
    drop, zero, one, cascade = (kl_divergence(of_each[0], other) for other in of_each[1:])
    assert drop > 3 * zero
    assert zero > one > cascade > 1e-7


def test_an_expert_is_computed_once(model: Any, low: Path) -> None:
    """What one token of a batch needs exactly is exact for all of them."""
    tokens = Sequence0(9, models.N_VOCAB)
    with contexts(model, [EXECUTOR | {"lossy": f"lowbit:1:{low}"}]) as [(ctx, engine)]:
        decode(ctx, tokens.next_batch(16))
        n_layers, n_expert = len(split_layers(engine)), engine.board.n_expert
        rows = n_layers * 16 * N_USED
        assert 0 < n_not_exact(engine) < rows * (N_USED - 1) / N_USED / 2
        stats = engine.board.layer_stats[split_layers(engine)]
        assert (stats["n_host_experts"] <= n_expert).all()
        assert stats["n_host_rows"].sum() == rows


@contextmanager
def on_disk(path: Path, **way: Any) -> Iterator[tuple[Any, Engine]]:
    with (
        loaded_model(path, lazy_mode=LAZY_MODE_EXPERTS, load_mode=LOAD_MODE_NONE) as model,
        new_context(model) as ctx,
        attached_engine(ctx, ram_bytes=RAM, **way) as engine,
    ):
        yield ctx, engine


NO_DEVICE = {"device": "none", "cache": "0"}
PLACES = [NO_DEVICE, IN_GRAPH | {"cache": "30%"}, EXECUTOR | {"cache": "30%"}]


@pytest.mark.parametrize("place", PLACES, ids=["memory", "in-graph", "executor"])
def test_with_experts_on_disk(path: Path, same: Path, place: dict[str, Any]) -> None:
    tokens = Sequence0(11, models.N_VOCAB)
    with (
        on_disk(path, **place) as (a, exact),
        on_disk(path, **place, lossy=f"lowbit:1:{same}") as (b, engine),
    ):
        for width in WIDTHS:
            batch = tokens.next_batch(width)
            assert_same_bits(decode(b, batch), decode(a, batch), f"{width} tokens")
        assert n_not_exact(engine) > 0
        n_asked, n_asked_exactly = (x.tier().n_hit + x.tier().n_miss for x in (engine, exact))
        assert n_asked < n_asked_exactly, "what a copy has is not asked for"


def test_types_may_differ_within_a_file(model: Any, path: Path) -> None:
    mixed = models.write_copy(path.with_name("mixed.gguf"), path, Type.F16, Type.Q5_0, Type.Q8_0, Type.Q4_1)
    tokens = Sequence0(13, models.N_VOCAB)
    with contexts(model, [{}, {"lossy": "drop:1"}, {"lossy": f"lowbit:1:{mixed}"}]) as found:
        for width in WIDTHS:
            batch = tokens.next_batch(width)
            exact, drop, mix = (decode(ctx, batch) for ctx, _ in found)
            if width != PROMPT:
                assert 0 < kl_divergence(exact, mix) < kl_divergence(exact, drop) / 2
        assert n_not_exact(found[2][1]) > 0


def refused(model: Any, file: Path | str, **fields: Any) -> str:
    params: dict[str, Any] = {"device": "cpu", "cache": "50%", "lossy": f"lowbit:1:{file}"}
    with new_context(model) as ctx, pytest.raises(EngineError) as refusal:
        Engine.attach(ctx, EngineParams(**(params | fields)))
    assert refusal.value.exit_code == 2
    return str(refusal.value)


def test_files_that_are_no_copy_are_refused(model: Any, path: Path, same: Path, tmp_path: Path) -> None:
    assert "No such file" in refused(model, tmp_path / "nowhere.gguf")
    assert "no GGUF" in refused(model, tmp_path)
    (tmp_path / "text").write_text("text")
    assert "no GGUF" in refused(model, tmp_path / "text")
    (tmp_path / "header.gguf").write_bytes(same.read_bytes()[:200])
    assert "no GGUF, or its header is cut off" in refused(model, tmp_path / "header.gguf")
    (tmp_path / "short.gguf").write_bytes(same.read_bytes()[:-4096])
    assert "it is cut off: blk.2.ffn_" in refused(model, tmp_path / "short.gguf")
    fewer = models.write_model(tmp_path / "fewer.gguf", NAME, ((Type.Q8_0,) * 3,), n_layer=2)
    assert "has no blk.2.ffn_" in refused(model, fewer)
    other = models.write_model(tmp_path / "other.gguf", "mixtral", ((Type.Q8_0,) * 3,))
    assert "give a file of the same model" in refused(model, other)


def test_what_the_kernels_cannot_compute_is_refused(model: Any, path: Path, low: Path) -> None:
    floats = models.write_copy(path.with_name("floats.gguf"), path, Type.F32)
    assert "no kernels for f32 (blk.0.ffn_" in refused(model, floats)
    assert "ggml's kernels cannot compute" in refused(model, low, host_kernels="ggml")
    assert "needs a device, or experts on disk" in refused(model, low, device="none", cache="0")
    assert "give lowbit:N:FILE" in refused(model, low, lossy=f"lowbit:-1:{low}")


def test_a_model_without_kernels_is_refused(low: Path, tmp_path: Path) -> None:
    floats = models.write_model(tmp_path / "floats.gguf", NAME, ((Type.F32,) * 3,))
    with loaded_model(floats) as model:
        assert "needs the engine's own kernels, which layer 0" in refused(model, low)
