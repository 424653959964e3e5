"""Stock and split contexts side by side: decode the same batches in both, and place experts at random.

Plain llama.cpp calls rather than pyspac.forward, for several sequences and any output flags.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pyspac.engine.board import NO_BUDGET
from pyspac.engine.engine import Engine, cpu_buffer_type
from pyspac.engine.params import EngineParams
from pyspac.forward.libllama import lib as llama  # the bindings, on the build's libllama; their log is silent
from pyspac.forward.model import EXPERT_TENSORS

WAIT_MS = 20_000
N_UBATCH = 64


@contextmanager
def loaded_model(path: Path, **fields: Any) -> Iterator[Any]:
    """A model without weight repacking: both sides of the split then run stock's kernels.

    `fields` are those of llama_model_params; without them everything is on the CPU.
    """
    params = llama.llama_model_default_params()
    params.use_extra_bufts = False
    params.n_gpu_layers = 0
    for name, value in fields.items():
        setattr(params, name, value)
    model = llama.llama_model_load_from_file(str(path).encode(), params)
    assert model, f"llama.cpp cannot load {path}"
    try:
        yield model
    finally:
        llama.llama_model_free(model)


class _BuftOverride(ctypes.Structure):
    """struct llama_model_tensor_buft_override."""

    _fields_ = [("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p)]


def shares(*parts: float) -> dict[str, Any]:
    """A field of a model: how its layers are shared out. The array outlives the call that loads."""
    values = (ctypes.c_float * 16)(*parts)
    return {"tensor_split": ctypes.cast(values, ctypes.POINTER(ctypes.c_float))}


@contextmanager
def offloaded_model(path: Path, *on: Any, **model_fields: Any) -> Iterator[Any]:
    """All layers on these devices, the experts on the host, as --cpu-moe does."""
    overrides = (_BuftOverride * 2)(
        _BuftOverride(EXPERT_TENSORS, cpu_buffer_type()), _BuftOverride(None, None)
    )
    devices = (ctypes.c_void_p * (len(on) + 1))(*(device.handle for device in on), None)
    fields = {
        "n_gpu_layers": 99,
        "devices": ctypes.addressof(devices),
        "tensor_buft_overrides": ctypes.addressof(overrides),
    } | model_fields
    with loaded_model(path, **fields) as model:
        yield model


@contextmanager
def new_context(
    model: Any, *, n_ctx: int = 512, n_seq: int = 1, n_threads: int = 1, **fields: Any
) -> Iterator[Any]:
    """One thread by default: several would wait for each other in ggml's barriers, long on a busy machine.

    `fields`: further ones of llama_context_params.
    """
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_seq_max = n_ctx * n_seq, n_seq
    params.n_batch = params.n_ubatch = N_UBATCH
    params.n_threads = params.n_threads_batch = n_threads
    for name, value in fields.items():
        setattr(params, name, value)
    ctx = llama.llama_init_from_model(model, params)
    assert ctx, "llama.cpp cannot create a context"
    try:
        yield ctx
    finally:
        llama.llama_free(ctx)


@contextmanager
def attached_engine(ctx: Any, **fields: Any) -> Iterator[Engine]:
    """An engine on the CPU, with room for half of the experts, in which only what is asked for moves.

    `fields` are those of EngineParams.
    """
    engine = Engine.attach(ctx, EngineParams(**{"device": "cpu", "cache": "50%", "fill": False} | fields))
    try:
        yield engine
    finally:
        engine.close()


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens with positions and sequences; `outputs` marks those whose logits are wanted (default: all)."""

    tokens: Sequence[int]
    pos: Sequence[int]
    seq: Sequence[int]
    outputs: Sequence[int] = field(default=())

    def output_flags(self) -> list[int]:
        return list(self.outputs) or [1] * len(self.tokens)


def decode(ctx: Any, batch: Batch) -> np.ndarray:
    """Decode one batch and return its outputs' logits: [n_outputs, n_vocab] float32."""
    n, flags = len(batch.tokens), batch.output_flags()
    raw = llama.llama_batch_init(n, 0, 1)
    raw.n_tokens = n
    for i in range(n):
        raw.token[i], raw.pos[i], raw.n_seq_id[i], raw.logits[i] = batch.tokens[i], batch.pos[i], 1, flags[i]
        raw.seq_id[i][0] = batch.seq[i]
    status = llama.llama_decode(ctx, raw)
    llama.llama_batch_free(raw)
    assert status == 0, f"llama_decode returned {status}"
    n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(llama.llama_get_model(ctx)))
    if sum(flags) == 0:
        return np.empty((0, n_vocab), np.float32)
    return np.ctypeslib.as_array(llama.llama_get_logits(ctx), shape=(sum(flags), n_vocab)).copy()


class Sequence0:
    """Random tokens of sequence 0, batch after batch, at consecutive positions."""

    def __init__(self, seed: int, n_vocab: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.n_vocab = n_vocab
        self.n_past = 0

    def next_batch(self, n_tokens: int) -> Batch:
        tokens = [int(token) for token in self.rng.integers(3, self.n_vocab, n_tokens)]
        first, self.n_past = self.n_past, self.n_past + n_tokens
        return Batch(tokens, range(first, self.n_past), [0] * n_tokens)


def split_layers(engine: Engine) -> np.ndarray:
    """Numbers of the layers that the engine splits: [n] int."""
    return np.flatnonzero(engine.board.expert_bytes)


def decide(engine: Engine, utility: np.ndarray, tau: np.ndarray, loads: np.ndarray) -> None:
    """Write a decision: utility [n_layer, n_expert], tau [n_layer], loads [n] as il * n_expert + ie."""
    board = engine.board
    with board.decision():
        board.utility[:] = utility
        board.tau[:] = tau
        board.load[: len(loads)] = loads
        board.n_load[0] = len(loads)
        board.byte_budget[:] = NO_BUDGET


def decide_randomly(engine: Engine, rng: np.random.Generator) -> None:
    """Random utilities, middling thresholds, all loads in random order: some experts come, some leave."""
    board = engine.board
    keys = (split_layers(engine)[:, None] * board.n_expert + np.arange(board.n_expert)).ravel()
    utility = rng.integers(0, 256, board.utility.shape, dtype=np.uint8)
    tau = rng.integers(64, 192, board.tau.shape, dtype=np.uint8)
    decide(engine, utility, tau, rng.permutation(keys).astype(np.uint32))


def decide_all(engine: Engine) -> None:
    """Every expert on the device, as far as there is room."""
    board = engine.board
    keys = (split_layers(engine)[:, None] * board.n_expert + np.arange(board.n_expert)).ravel()
    decide(engine, np.full(board.utility.shape, 200), np.full(board.tau.shape, 1), keys.astype(np.uint32))


def place(engine: Engine) -> None:
    """Take the decision over and wait until its copies are complete."""
    engine.apply()
    engine.wait_idle(WAIT_MS)


def assert_same_bits(split: np.ndarray, stock: np.ndarray, where: str) -> None:
    """Equal to the last bit, and worth comparing: finite and not constant."""
    assert np.isfinite(stock).all(), where
    assert stock.size == 0 or stock.std() > 0.01, where
    differing = split.view(np.uint32) != stock.view(np.uint32)
    error = np.abs(split - stock).max(initial=0)
    assert not differing.any(), (
        f"{where}: {differing.sum()} of {differing.size} logits differ, by up to {error}"
    )


def n_os_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def in_new_thread(action: Callable[[], None]) -> None:
    """OpenMP keeps a team per thread that opens one: a new thread has none yet."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def submit(ctx: Any, tokens: Sequence0, width: int) -> None:
    """Decode, and do not ask for the result: the device may still be at work, and call the engine."""
    batch = tokens.next_batch(width)
    raw = llama.llama_batch_init(width, 0, 1)
    raw.n_tokens = width
    for i in range(width):
        raw.token[i], raw.pos[i], raw.n_seq_id[i], raw.logits[i] = batch.tokens[i], batch.pos[i], 1, 1
        raw.seq_id[i][0] = 0
    assert llama.llama_decode(ctx, raw) == 0
    llama.llama_batch_free(raw)
