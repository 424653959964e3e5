"""Experts on disk beside a device: the bits of everything in memory, whoever computes, and faults.

The device is the CPU with the engine's own kernels, so both sides of a split compute the same bits.
"""

from __future__ import annotations

import os
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
    llama,
    loaded_model,
    new_context,
    place,
)

from pyspac.engine.engine import Engine
from pyspac.forward.model import LAZY_MODE_EXPERTS, LOAD_MODE_NONE

WIDTHS = (40, 1, 2, 5, 9, 16)  # the first is wider than a split
HOST_MODES = ("in-graph", "executor")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return models.write_model(tmp_path / "model.gguf", "qwen3moe", [(Type.Q4_K, Type.Q4_K, Type.Q6_K)])


@contextmanager
def on_disk(path: Path, host_mode: str, **fields: Any) -> Iterator[tuple[Any, Engine]]:
    with ExitStack() as stack:
        model = stack.enter_context(loaded_model(path, lazy_mode=LAZY_MODE_EXPERTS, load_mode=LOAD_MODE_NONE))
        ctx = stack.enter_context(new_context(model))
        yield (
            ctx,
            stack.enter_context(
                attached_engine(ctx, host_mode=host_mode, cache="30%", ram_bytes=3 << 20, **fields)
            ),
        )


@contextmanager
def in_memory(path: Path) -> Iterator[Any]:
    """The same kernels, prompts included."""
    with (
        loaded_model(path) as model,
        new_context(model) as ctx,
        attached_engine(ctx, host_kernels="spac", max_batch=64),
    ):
        yield ctx


@pytest.mark.parametrize("host_mode", HOST_MODES)
@pytest.mark.parametrize("waits", [True, False])
def test_same_bits_while_experts_come_and_go(path: Path, host_mode: str, waits: bool) -> None:
    rng = np.random.default_rng(4)
    with in_memory(path) as expected, on_disk(path, host_mode, next_layer=1) as (ctx, engine):
        for i in range(18):
            if i % len(WIDTHS) == 0:  # llama.cpp's attention divides long sequences by its threads
                tokens = Sequence0(i, models.N_VOCAB)
                forget(ctx)
                forget(expected)
            decide_randomly(engine, rng)
            engine.apply()
            if waits:
                place(engine)
            batch = tokens.next_batch(WIDTHS[i % len(WIDTHS)])
            assert_same_bits(decode(ctx, batch), decode(expected, batch), f"batch {i}")
        engine.end_forward()
        assert 0 < engine.board.in_memory.sum() == engine.board.tier["n_resident"][0]
        tier, counters = engine.tier(), engine.board.counters[0]
        assert counters["n_hit"] > 0
        assert counters["n_miss"] > 0
        assert counters["n_load_failures"] == 0
        assert counters["n_pinned_steals"] == 0
        assert 0 < tier.n_to_device_read <= tier.n_to_device
        assert tier.n_miss > 0


@pytest.mark.parametrize("host_mode", HOST_MODES)
def test_a_file_that_gets_shorter(path: Path, host_mode: str) -> None:
    """A forward fails and says why, or has the right numbers; once the file is whole all are right again."""
    content = path.read_bytes()
    with in_memory(path) as expected, on_disk(path, host_mode) as (ctx, engine):
        for i in range(4):
            os.truncate(path, len(content) // 3)
            decide_all(engine)
            engine.apply()  # its copies fail as well, which is no failure of a forward
            forget(ctx)
            with pytest.raises(AssertionError, match="llama_decode returned 2"):
                decode_some(ctx, i)
            assert "the file has become shorter" in engine.tier().error
            path.write_bytes(content)
            forget(ctx)
            forget(expected)
            batch = Sequence0(20 + i, models.N_VOCAB).next_batch(16)
            assert_same_bits(decode(ctx, batch), decode(expected, batch), f"after failure {i}")
        assert engine.tier().error == ""


def decode_some(ctx: Any, seed: int) -> None:
    """Until a batch needs what cannot be read."""
    for width in (1, 16, 40):
        decode(ctx, Sequence0(seed, models.N_VOCAB).next_batch(width))


def forget(ctx: Any) -> None:
    llama.llama_memory_clear(llama.llama_get_memory(ctx), True)


def test_an_end_with_copies_under_way(path: Path) -> None:
    for i in range(6):
        with on_disk(path, HOST_MODES[i % 2], copy_gb_s=0.01) as (ctx, engine):
            decide_all(engine)
            engine.apply()
            if i >= 3:
                decode(ctx, Sequence0(1, models.N_VOCAB).next_batch(4))
