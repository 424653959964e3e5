"""Two CUDA devices in one context, whose streams call the engine: real ones, or CUDA_EMULATOR_DEVICES=2."""

from __future__ import annotations

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

from pyspac._native import lib
from pyspac.engine.device_stats import read_devices
from pyspac.engine.devices import gpu_devices
from pyspac.engine.engine import Engine

WIDTHS = (5, 1, 1, 1, 9, 40, 9, 2, 1)  # CUDA records a graph where a width comes a second time

pytestmark = pytest.mark.gpu


@contextmanager
def split_context(path: Path, **fields: Any) -> Iterator[tuple[Any, Engine]]:
    devices = [device for device in gpu_devices() if device.name in ("CUDA0", "CUDA1")]
    if len(devices) < 2:
        pytest.skip("one CUDA device")
    with (
        offloaded_model(path, *devices) as model,
        new_context(model) as ctx,
        attached_engine(ctx, device="CUDA0,CUDA1", **fields) as engine,
    ):
        assert set(engine.board.layer_device[split_layers(engine)].tolist()) == {0, 1}
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
        assert engine.board.counters[0]["n_pinned_steals"] == 0
        assert all(device.n_loads > 0 and device.n_device_rows > 0 for device in read_devices(engine.board))
        return logits


@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss"])
def test_logits_are_those_with_stops(name: str, tmp_path: Path) -> None:
    path = models.write_model(tmp_path / "model.gguf", name)
    pairs = zip(logits_of(path, "in-stream"), logits_of(path, "executor"), strict=True)
    for index, (in_stream, with_stops) in enumerate(pairs):
        assert_same_bits(in_stream, with_stops, f"batch {index}")


def test_forwards_do_not_overtake_each_other(tmp_path: Path) -> None:
    """Nobody asks for the logits: the second device is at work when the next forward is submitted."""
    path = models.write_model(tmp_path / "model.gguf", "qwen3moe")
    with split_context(path) as (ctx, engine):
        assert engine.info().host_mode == lib.SPAC_HOST_IN_STREAM
        tokens = Sequence0(1, models.N_VOCAB)
        for _ in range(8):
            submit(ctx, tokens, 1)
        engine.end_forward()
        stats = engine.board.layer_stats[split_layers(engine)]
        assert (stats["n_calls"] == 8).all()
        assert engine.board.counters[0]["n_forward"] == 8
