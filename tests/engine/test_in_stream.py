"""Dispatch and collect in the stream of a CUDA device, a real one or tools/cuda_emulator's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf_models as models
import numpy as np
import pytest
from llama_helpers import (
    Sequence0,
    assert_same_bits,
    attached_engine,
    decide_randomly,
    decode,
    new_context,
    offloaded_model,
    place,
    split_layers,
    submit,
)

from pyspac._native import check, lib
from pyspac.engine.devices import choose_device
from pyspac.engine.engine import Engine
from pyspac.engine.params import EngineParams

WIDTHS = (5, 1, 1, 1, 9, 9, 9, 2, 1)  # CUDA records a graph where a width comes a second time

pytestmark = pytest.mark.gpu


@contextmanager
def split_context(path: Path, **fields: Any) -> Iterator[tuple[Any, Engine]]:
    device = choose_device("CUDA0")
    with (
        offloaded_model(path, device) as model,
        new_context(model) as ctx,
        attached_engine(ctx, device=device.name, **fields) as engine,
    ):
        yield ctx, engine


def logits_of(path: Path, host_mode: str) -> list[np.ndarray]:
    with split_context(path, host_mode=host_mode) as (ctx, engine):
        tokens, rng = Sequence0(1, models.N_VOCAB), np.random.default_rng(2)
        logits = []
        for width in WIDTHS:
            decide_randomly(engine, rng)
            place(engine)
            logits.append(decode(ctx, tokens.next_batch(width)))
        engine.end_forward()
        stats = engine.board.layer_stats[split_layers(engine)]
        assert (stats["n_calls"] == len(WIDTHS)).all()
        assert stats["n_device_rows"].sum() > 0
        assert stats["n_host_rows"].sum() > 0
        return logits


@pytest.mark.parametrize("name", ["qwen3moe", "llama4", "gpt-oss"])
def test_logits_are_those_with_stops(name: str, tmp_path: Path) -> None:
    """To the last bit: the same kernels compute the same experts in the same order."""
    path = models.write_model(tmp_path / "model.gguf", name, models.MIXED_TYPES)
    pairs = zip(logits_of(path, "in-stream"), logits_of(path, "executor"), strict=True)
    for index, (in_stream, with_stops) in enumerate(pairs):
        assert_same_bits(in_stream, with_stops, f"batch {index}")


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    return models.write_model(tmp_path / "model.gguf", "qwen3moe")


def test_a_forward_that_ends_is_whole(qwen: Path) -> None:
    """end_forward waits for the stream, although nobody asked for the logits."""
    with split_context(qwen) as (ctx, engine):
        assert engine.info().host_mode == lib.SPAC_HOST_IN_STREAM
        tokens = Sequence0(1, models.N_VOCAB)
        for n_forwards in range(1, 5):
            submit(ctx, tokens, 1)
            engine.end_forward()
            stats = engine.board.layer_stats[split_layers(engine)]
            assert (stats["n_calls"] == n_forwards).all()
            assert engine.board.counters[0]["n_forward"] == n_forwards


def test_tokens_that_do_not_count(qwen: Path) -> None:
    """Said before a forward and taken back at once: it holds for all layers of that forward."""
    with split_context(qwen) as (ctx, engine):
        tokens, n_used = Sequence0(1, models.N_VOCAB), models.ARCHITECTURES["qwen3moe"].shape.n_expert_used
        engine.count_first(1)
        submit(ctx, tokens, 5)
        engine.count_first(0)
        engine.end_forward()
        assert (engine.board.counts[split_layers(engine)].sum(axis=1) == n_used).all()


def test_decisions_and_cancels_while_the_stream_calls(qwen: Path) -> None:
    """From another thread, at any time; no expert is taken from a layer that uses it."""
    with split_context(qwen, fill=True) as (ctx, engine):
        tokens, rng, stop = Sequence0(1, models.N_VOCAB), np.random.default_rng(2), threading.Event()

        def interfere() -> None:
            while not stop.is_set():
                decide_randomly(engine, rng)
                engine.apply()
                check(lib.spac_engine_cancel(engine._live()))

        thread = threading.Thread(target=interfere)
        thread.start()
        try:
            for width in WIDTHS:
                submit(ctx, tokens, width)
        finally:
            stop.set()
            thread.join()
        engine.end_forward()
        counters = engine.board.counters[0]
        assert counters["n_forward"] == len(WIDTHS)
        assert counters["n_pinned_steals"] == 0


@pytest.mark.parametrize("first", ["context", "engine"])
@pytest.mark.parametrize("n_forwards", [1, 3])
def test_freed_in_mid_air(first: str, n_forwards: int, qwen: Path) -> None:
    """Whoever goes first waits for what the stream still calls."""
    device = choose_device("CUDA0")
    with offloaded_model(qwen, device) as model, new_context(model) as ctx:
        engine = Engine.attach(ctx, EngineParams(device=device.name, cache="50%"))
        tokens = Sequence0(1, models.N_VOCAB)
        for _ in range(n_forwards):
            submit(ctx, tokens, 1)
        if first == "engine":
            engine.close()
            decode(ctx, tokens.next_batch(1))  # goes on without
    engine.close()
