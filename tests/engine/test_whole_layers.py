"""Layers that the device has whole: stock's logits to the last bit, while layers change between the two.

The CPU is the device. Batches wider than max_batch compute such layers from the slots, too.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import gguf_models as models
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from llama_helpers import Sequence0, decide_randomly, decode, llama, place, split_layers
from test_split_exact import HOST_MODES, Pair, open_pair

from pyspac.engine.board import LayerMode, Residency
from pyspac.engine.engine import Engine

ONE_GROUP: tuple[models.ExpertTypes, ...] = (Type.Q8_0,)  # three layers of 16 experts share their slots


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    return models.write_model(tmp_path / "model.gguf", "qwen3moe", ONE_GROUP)


def want(engine: Engine, rng: np.random.Generator, layers: list[int]) -> None:
    """A random decision, with these layers whole."""
    board = engine.board
    decide_randomly(engine, rng)
    with board.decision():
        board.want_whole[:] = 0
        board.want_whole[layers] = 1


def settle(pair: Pair, tokens: Sequence0) -> None:
    """Decode until what was wanted is in force: it takes a graph to reserve slots, another to be built."""
    for _ in range(4):
        pair.decode(tokens.next_batch(1))
        pair.engine.end_forward()
        pair.engine.wait_idle(5000)


def whole_layers(engine: Engine) -> list[int]:
    return np.flatnonzero(engine.board.whole == LayerMode.WHOLE).tolist()


def calls(engine: Engine) -> np.ndarray[Any, Any]:
    engine.end_forward()
    return engine.board.layer_stats["n_calls"].astype(np.int64)


@pytest.mark.parametrize("host_mode", HOST_MODES)
@pytest.mark.parametrize("name", [name for name in models.ARCHITECTURES if name != models.NOT_SPLIT])
def test_whole_architecture_is_bit_identical(name: str, host_mode: str, tmp_path: Path) -> None:
    """With room for all: every layer is whole, nothing is dispatched, and no host expert computed."""
    path = models.write_model(tmp_path / "model.gguf", name)
    with open_pair(path, name, host_mode=host_mode, cache="100%") as pair:
        tokens, rng = Sequence0(1, models.N_VOCAB), np.random.default_rng(2)
        layers = split_layers(pair.engine).tolist()
        pair.decode(tokens.next_batch(3))
        want(pair.engine, rng, layers)
        settle(pair, tokens)
        assert whole_layers(pair.engine) == layers
        assert (pair.engine.board.residency[layers] == Residency.RESIDENT).all()
        before, n_forward = calls(pair.engine), int(pair.engine.board.counters["n_forward"][0])
        for width in (1, 2, 5, 9, 16, 40, 5, 40):
            pair.decode(tokens.next_batch(width))
        assert (calls(pair.engine) == before).all()
        assert int(pair.engine.board.counters["n_forward"][0]) == n_forward + 6
        assert not pair.engine.board.prompt_counts.any()


def test_a_split_forward_behind_a_whole_one_is_one_of_its_own(qwen: Path) -> None:
    """The whole one called nobody: its end is seen when the next one begins."""
    with open_pair(qwen, "qwen3moe", cache="100%") as pair:
        tokens, rng = Sequence0(12, models.N_VOCAB), np.random.default_rng(13)
        want(pair.engine, rng, [0, 1, 2])
        settle(pair, tokens)
        before, n_forward = calls(pair.engine), int(pair.engine.board.counters["n_forward"][0])
        pair.decode(tokens.next_batch(1))
        want(pair.engine, rng, [])
        pair.engine.apply()
        pair.decode(tokens.next_batch(1))
        assert (calls(pair.engine) == before + 1).all()
        assert int(pair.engine.board.counters["n_forward"][0]) == n_forward + 2


@pytest.mark.parametrize("host_mode", HOST_MODES)
def test_one_layer_is_whole_and_the_others_share_the_rest(host_mode: str, qwen: Path) -> None:
    with open_pair(qwen, "qwen3moe", host_mode=host_mode, cache="60%") as pair:
        tokens, rng = Sequence0(3, models.N_VOCAB), np.random.default_rng(4)
        for layers in ([1], [0], [], [2]):
            want(pair.engine, rng, layers)
            settle(pair, tokens)
            assert whole_layers(pair.engine) == layers
            before = calls(pair.engine)
            for width in range(1, 41):
                want(pair.engine, rng, layers)
                place(pair.engine)
                pair.decode(tokens.next_batch(width))
                tokens.n_past -= width
                models_forget(pair, tokens.n_past)
            is_called = calls(pair.engine) > before
            assert is_called.tolist() == [il not in layers for il in range(3)]
        counters = pair.engine.board.counters[0]
        assert counters["n_evictions"] > 0
        assert counters["n_pinned_steals"] == 0


def models_forget(pair: Pair, n_past: int) -> None:
    for ctx in (pair.stock, pair.split):
        llama.llama_memory_seq_rm(llama.llama_get_memory(ctx), 0, n_past, -1)


@pytest.mark.parametrize("stage", ["never", "always"])
@pytest.mark.parametrize("host_mode", HOST_MODES)
def test_modes_change_in_another_thread(host_mode: str, stage: str, qwen: Path) -> None:
    """A scheduler that wants other layers whole whenever it likes, at every width from 1 to 40."""
    with open_pair(qwen, "qwen3moe", host_mode=host_mode, cache="90%", stage=stage) as pair:
        stop, seen = threading.Event(), set()

        def schedule() -> None:
            rng = np.random.default_rng(5)
            while not stop.wait(0.004):
                want(pair.engine, rng, np.flatnonzero(rng.random(3) < 0.5).tolist())

        thread = threading.Thread(target=schedule)
        thread.start()
        try:
            tokens, widths = (
                Sequence0(6, models.N_VOCAB),
                np.random.default_rng(7).permutation(np.arange(1, 41)),
            )
            for width in [*widths.tolist()] * 8:
                pair.decode(tokens.next_batch(width))
                seen.add(tuple(pair.engine.board.whole.tolist()))
                tokens.n_past -= width
                models_forget(pair, tokens.n_past)
        finally:
            stop.set()
            thread.join()
        counters = pair.engine.board.counters[0]
        assert len(seen) >= 3
        assert counters["n_pinned_steals"] == 0
        assert counters["n_load_failures"] == 0


def test_a_layer_without_room_stays_split(qwen: Path) -> None:
    """Slots for one layer and a half: of two that are wanted, one is whole."""
    with open_pair(qwen, "qwen3moe", cache="50%") as pair:
        tokens, rng = Sequence0(8, models.N_VOCAB), np.random.default_rng(9)
        want(pair.engine, rng, [0, 2])
        settle(pair, tokens)
        assert whole_layers(pair.engine) == [0]


@pytest.mark.parametrize("fields", [{"evict": False}, {"host_kernels": "spac"}], ids=str)
def test_where_layers_cannot_be_whole(fields: dict[str, Any], qwen: Path) -> None:
    """Nobody may be evicted; or slots are computed by the engine's own kernels, whose bits are others."""
    with open_pair(qwen, "qwen3moe", cache="100%", **fields) as pair:
        tokens, rng = Sequence0(10, models.N_VOCAB), np.random.default_rng(11)
        want(pair.engine, rng, [0, 1, 2])
        for _ in range(4):
            decode(pair.split, tokens.next_batch(1))
            pair.engine.end_forward()
            pair.engine.wait_idle(5000)
        assert not pair.engine.board.whole.any()
