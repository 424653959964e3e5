"""With the CPU as the device, a split context's logits equal stock's to the last bit, for any placement.

Every architecture and expert type, 1 to 16 tokens, placements that change between and during decodes.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf_models as models
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from llama_helpers import (
    Batch,
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
    split_layers,
)

from pyspac.engine.board import Residency
from pyspac.engine.engine import Engine
from pyspac.errors import EngineError

WIDTHS = (1, 2, 5, 9, 16)
PROMPT_LENGTH = 40  # more than max_batch: takes stock's path
HOST_MODES = ("in-graph", "executor")

K_QUANT_MIX: tuple[models.ExpertTypes, ...] = (
    (Type.Q4_K, Type.Q4_K, Type.Q6_K),
    (Type.Q5_K, Type.Q5_K, Type.Q8_0),
    (Type.IQ4_XS, Type.Q3_K, Type.Q5_K),
)
TYPES: dict[str, tuple[models.ExpertTypes, ...]] = {
    **{
        t.name: (t,) for t in (Type.Q8_0, Type.Q4_K, Type.Q6_K, Type.Q5_K, Type.IQ4_XS, Type.Q4_0, Type.MXFP4)
    },
    **{t.name: (t,) for t in (Type.F16, Type.BF16, Type.F32, Type.Q2_K, Type.IQ2_XXS, Type.IQ3_S, Type.Q5_1)},
    "mix": K_QUANT_MIX,
}


class Pair:
    """A stock context and a split one of the same model, decoding the same batches."""

    def __init__(self, stock: Any, split: Any, engine: Engine, n_used: int) -> None:
        self.stock, self.split, self.engine, self.n_used = stock, split, engine, n_used
        self.n_split_tokens = 0  # decoded through the split path
        self.n_batches = 0

    def decode(self, batch: Batch) -> None:
        """Decode in both and compare."""
        n = len(batch.tokens)
        self.n_batches += 1
        where = f"batch {self.n_batches} of {n} tokens"
        assert_same_bits(decode(self.split, batch), decode(self.stock, batch), where)
        if n <= self.engine.board.max_batch:
            self.n_split_tokens += n

    def assert_engine_was_used(self) -> None:
        """Every split layer computed each (token, expert) once, some on the device and some on the host."""
        self.engine.end_forward()
        stats = self.engine.board.layer_stats[split_layers(self.engine)]
        n_rows = stats["n_device_rows"] + stats["n_host_rows"]
        assert (n_rows == self.n_split_tokens * self.n_used).all()
        assert (stats["n_device_rows"] > 0).all()
        assert (stats["n_host_rows"] > 0).all()
        counters = self.engine.board.counters[0]
        assert counters["n_hit_rows"] == stats["n_device_rows"].sum()
        assert counters["n_miss_rows"] + counters["n_late_rows"] == stats["n_host_rows"].sum()
        assert counters["n_forward_both"] > 0
        assert counters["n_pinned_steals"] == 0
        assert counters["n_load_failures"] == 0


@contextmanager
def open_pair(
    path: Path, name: str, n_seq: int = 1, n_threads: int = 1, **engine_fields: Any
) -> Iterator[Pair]:
    n_used = models.ARCHITECTURES[name].shape.n_expert_used
    with (
        loaded_model(path) as model,
        new_context(model, n_seq=n_seq, n_threads=n_threads) as stock,
        new_context(model, n_seq=n_seq, n_threads=n_threads) as split,
        attached_engine(split, **engine_fields) as engine,
    ):
        yield Pair(stock, split, engine, n_used)


def decode_widths(pair: Pair, tokens: Sequence0, rng: np.random.Generator, n_repeats: int = 3) -> None:
    """A prompt, then every width under a new random placement each time."""
    pair.decode(tokens.next_batch(PROMPT_LENGTH))
    for _ in range(n_repeats):
        for width in WIDTHS:
            decide_randomly(pair.engine, rng)
            place(pair.engine)
            pair.decode(tokens.next_batch(width))


@pytest.fixture
def write_model(tmp_path: Path) -> Any:
    def write(name: str, types: Sequence[models.ExpertTypes] = models.MIXED_TYPES) -> Path:
        return models.write_model(tmp_path / "model.gguf", name, types)

    return write


@pytest.fixture
def qwen(write_model: Any) -> Path:
    """Three layers of 16 experts, top-4, three layout groups."""
    return write_model("qwen3moe")


# ---- every architecture, every type --------------------------------------------------------------


@pytest.mark.parametrize("host_mode", HOST_MODES)
@pytest.mark.parametrize("name", [name for name in models.ARCHITECTURES if name != models.NOT_SPLIT])
def test_architecture_is_split_bit_identically(name: str, host_mode: str, write_model: Any) -> None:
    with open_pair(write_model(name), name, host_mode=host_mode) as pair:
        assert pair.engine.declined() == {}
        assert split_layers(pair.engine).tolist() == models.ARCHITECTURES[name].moe_layers()
        decode_widths(pair, Sequence0(1, models.N_VOCAB), np.random.default_rng(2))
        pair.assert_engine_was_used()


@pytest.mark.parametrize("n_threads", [2, 3])
@pytest.mark.parametrize("host_mode", HOST_MODES)
def test_several_threads(host_mode: str, n_threads: int, qwen: Path) -> None:
    with open_pair(qwen, "qwen3moe", n_threads=n_threads, host_mode=host_mode) as pair:
        decode_widths(pair, Sequence0(21, models.N_VOCAB), np.random.default_rng(22), n_repeats=1)
        pair.assert_engine_was_used()


@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES.keys())
@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss"])
def test_expert_types(name: str, types: tuple[models.ExpertTypes, ...], write_model: Any) -> None:
    with open_pair(write_model(name, types), name) as pair:
        decode_widths(pair, Sequence0(3, models.N_VOCAB), np.random.default_rng(4), n_repeats=2)
        pair.assert_engine_was_used()


@pytest.mark.parametrize("width", range(1, 18))
def test_every_width(width: int, qwen: Path) -> None:
    """One width again and again reuses the graph; 17 is above max_batch and takes stock's path."""
    with open_pair(qwen, "qwen3moe") as pair:
        tokens, rng = Sequence0(width, models.N_VOCAB), np.random.default_rng(width)
        for _ in range(4):
            decide_randomly(pair.engine, rng)
            place(pair.engine)
            pair.decode(tokens.next_batch(width))
        pair.engine.end_forward()
        assert pair.engine.board.counters[0]["n_forward"] == (4 if width <= 16 else 0)


# ---- placements ----------------------------------------------------------------------------------


def test_nothing_resident(qwen: Path) -> None:
    with open_pair(qwen, "qwen3moe") as pair:
        tokens = Sequence0(5, models.N_VOCAB)
        for width in WIDTHS:
            pair.decode(tokens.next_batch(width))
        stats = pair.engine.board.layer_stats
        assert stats["n_device_rows"].sum() == 0
        assert (stats["n_host_rows"] == sum(WIDTHS) * pair.n_used).all()


def test_everything_resident(qwen: Path) -> None:
    with open_pair(qwen, "qwen3moe", cache="100%") as pair:
        decide_all(pair.engine)
        place(pair.engine)
        assert (pair.engine.board.residency == Residency.RESIDENT).all()
        tokens = Sequence0(6, models.N_VOCAB)
        for width in WIDTHS:
            pair.decode(tokens.next_batch(width))
        stats = pair.engine.board.layer_stats
        assert stats["n_host_rows"].sum() == 0
        assert (stats["n_device_rows"] == sum(WIDTHS) * pair.n_used).all()


@pytest.mark.parametrize("host_mode", HOST_MODES)
def test_experts_arrive_and_leave_while_decoding(host_mode: str, write_model: Any) -> None:
    """A link of 0.3 GB/s takes about a decode per expert, and nobody waits for it."""
    path = write_model("qwen3moe", (Type.Q8_0,))
    with open_pair(path, "qwen3moe", host_mode=host_mode, cache="30%", copy_gb_s=0.3) as pair:
        tokens, rng = Sequence0(7, models.N_VOCAB), np.random.default_rng(8)
        for i in range(60):
            if i % 3 == 0:
                decide_randomly(pair.engine, rng)
            pair.decode(tokens.next_batch(WIDTHS[i % 4]))
        counters = pair.engine.board.counters[0]
        assert counters["n_loads"] > 20
        assert counters["n_evictions"] > 5
        assert counters["n_late_rows"] > 0
        pair.assert_engine_was_used()


def test_decisions_from_another_thread(qwen: Path) -> None:
    """A scheduler that writes whenever it likes, also in the middle of a decode."""
    with open_pair(qwen, "qwen3moe", cache="40%") as pair:
        stop = threading.Event()

        def schedule() -> None:
            rng = np.random.default_rng(9)
            while not stop.wait(0.0005):
                decide_randomly(pair.engine, rng)

        thread = threading.Thread(target=schedule)
        thread.start()
        try:
            tokens = Sequence0(10, models.N_VOCAB)
            for i in range(80):
                pair.decode(tokens.next_batch(WIDTHS[i % 4]))
        finally:
            stop.set()
            thread.join()
        assert pair.engine.board.counters[0]["n_decisions"] > 10
        pair.assert_engine_was_used()


# ---- batches -------------------------------------------------------------------------------------


def random_batch(rng: np.random.Generator, n_past: list[int]) -> Batch:
    """1 to 4 tokens for each of some sequences; `n_past` is brought up to date."""
    chosen = [seq for seq in range(len(n_past)) if rng.random() < 0.7] or [0]
    tokens, pos, seqs = [], [], []
    for seq in chosen:
        n = int(rng.integers(1, 5))
        tokens += [int(token) for token in rng.integers(3, models.N_VOCAB, n)]
        pos += range(n_past[seq], n_past[seq] + n)
        seqs += [seq] * n
        n_past[seq] += n
    return Batch(tokens, pos, seqs)


@pytest.mark.parametrize("name", ["qwen3moe", "deepseek3", "qwen3next"])
def test_several_sequences_in_one_batch(name: str, write_model: Any) -> None:
    with open_pair(write_model(name), name, n_seq=4) as pair:
        rng, n_past = np.random.default_rng(11), [0] * 4
        for _ in range(25):
            decide_randomly(pair.engine, rng)
            place(pair.engine)
            pair.decode(random_batch(rng, n_past))
        pair.assert_engine_was_used()


@pytest.mark.parametrize("outputs", [(0, 0, 0, 0, 1), (1, 0, 1, 0, 0), (0, 0, 0, 0, 0)], ids=str)
def test_fewer_outputs_than_tokens(outputs: tuple[int, ...], qwen: Path) -> None:
    """The last layer then sees only the tokens with outputs, none at all in the extreme."""
    with open_pair(qwen, "qwen3moe") as pair:
        tokens, rng = Sequence0(12, models.N_VOCAB), np.random.default_rng(13)
        for _ in range(4):
            decide_randomly(pair.engine, rng)
            place(pair.engine)
            whole = tokens.next_batch(5)
            pair.decode(Batch(whole.tokens, whole.pos, whole.seq, outputs))
            pair.decode(tokens.next_batch(3))


def test_cleared_memory_and_rollback(qwen: Path) -> None:
    """Rejected draft tokens are taken back, then other tokens are decoded at their positions."""
    with open_pair(qwen, "qwen3moe") as pair:
        tokens, rng = Sequence0(14, models.N_VOCAB), np.random.default_rng(15)
        for i in range(12):
            decide_randomly(pair.engine, rng)
            place(pair.engine)
            pair.decode(tokens.next_batch(9))
            tokens.n_past -= int(rng.integers(1, 9))
            for ctx in (pair.stock, pair.split):
                llama.llama_memory_seq_rm(llama.llama_get_memory(ctx), 0, tokens.n_past, -1)
                if i % 5 == 4:
                    llama.llama_memory_clear(llama.llama_get_memory(ctx), True)
            tokens.n_past *= i % 5 != 4


def test_two_engines_in_one_process(qwen: Path) -> None:
    """Each context has its own engine, slots and placement."""
    with open_pair(qwen, "qwen3moe") as one, open_pair(qwen, "qwen3moe", cache="25%") as other:
        tokens, rng = (
            [Sequence0(16, models.N_VOCAB), Sequence0(17, models.N_VOCAB)],
            np.random.default_rng(18),
        )
        for _ in range(6):
            for i, pair in enumerate((one, other)):
                decide_randomly(pair.engine, rng)
                place(pair.engine)
                pair.decode(tokens[i].next_batch(5))
        one.assert_engine_was_used()
        other.assert_engine_was_used()


def test_detached_engine_leaves_stock_behind(qwen: Path) -> None:
    with loaded_model(qwen) as model, new_context(model) as stock, new_context(model) as split:
        tokens, rng = Sequence0(19, models.N_VOCAB), np.random.default_rng(20)
        for _ in range(3):
            with attached_engine(split) as engine:
                decide_randomly(engine, rng)
                place(engine)
                batch = tokens.next_batch(5)
                assert_same_bits(decode(split, batch), decode(stock, batch), "attached")
            batch = tokens.next_batch(5)
            assert_same_bits(decode(split, batch), decode(stock, batch), "detached")


# ---- what is left to stock ---------------------------------------------------------------------------------


def test_a_cpu_has_no_stream_that_calls(qwen: Path) -> None:
    with loaded_model(qwen) as model, new_context(model) as ctx:
        refused = pytest.raises(EngineError, match="cannot call the engine from its stream")
        with refused, attached_engine(ctx, host_mode="in-stream"):
            pass


def test_layers_with_two_sets_of_experts_are_declined(write_model: Any) -> None:
    """Every layer of this model: attaching fails and says why, and the context goes on as stock."""
    with (
        loaded_model(write_model(models.NOT_SPLIT)) as model,
        new_context(model) as stock,
        new_context(model) as ctx,
    ):
        with pytest.raises(EngineError, match="two sets of experts"), attached_engine(ctx):
            pass
        batch = Sequence0(23, models.N_VOCAB).next_batch(5)
        assert_same_bits(decode(ctx, batch), decode(stock, batch), "after the failure")


@contextmanager
def expert_lora(pair: Pair, path: Path) -> Iterator[None]:
    """The adapter of models.write_expert_lora, active in both contexts."""
    adapter = llama.llama_adapter_lora_init(llama.llama_get_model(pair.stock), str(path).encode())
    assert adapter
    adapters = (llama.llama_adapter_lora_p_ctypes * 1)(adapter)
    for ctx in (pair.stock, pair.split):
        assert llama.llama_set_adapters_lora(ctx, adapters, 1, (ctypes.c_float * 1)(1.0)) == 0
    yield
    for ctx in (pair.stock, pair.split):
        assert llama.llama_set_adapters_lora(ctx, None, 0, None) == 0


def test_layer_with_a_lora_on_experts_is_stocks(qwen: Path, tmp_path: Path) -> None:
    """The adapter's own layer is left to stock while it is active; the other layers stay split."""
    lora = models.write_expert_lora(tmp_path / "lora.gguf", "qwen3moe", il=1)
    with open_pair(qwen, "qwen3moe") as pair:
        tokens, rng = Sequence0(24, models.N_VOCAB), np.random.default_rng(25)
        decode_widths(pair, tokens, rng, n_repeats=1)
        before = split_rows(pair.engine)
        with expert_lora(pair, lora):
            decode_widths(pair, tokens, rng, n_repeats=1)
            assert pair.engine.declined() == {1: "a LoRA adapter touches the experts"}
        during = split_rows(pair.engine)
        assert (during > before).tolist() == [True, False, True]
        decode_widths(pair, tokens, rng, n_repeats=1)
        assert (split_rows(pair.engine) > during).all()
        assert pair.engine.declined() == {}


def split_rows(engine: Engine) -> np.ndarray:
    """(token, expert) pairs that the engine has computed: [n_layer] int."""
    stats = engine.board.layer_stats
    return (stats["n_device_rows"] + stats["n_host_rows"]).astype(np.int64)
