"""llama.cpp's own calls, as a case needs them: a model, a context, a batch decoded, states."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import pyspac._native  # noqa: F401  points the bindings at the build's libllama, so it comes first

# isort: split
from llama_cpp import llama_cpp as llama

__all__ = ["Batch", "Context", "Loaded", "Logits", "llama", "loaded", "new_context"]

N_CTX: Final = 256  # per sequence: llama.cpp's attention divides longer ones by its threads, and rounds so
LAZY_MODE_EXPERTS: Final = 3  # enum llama_lazy_mode: experts are mapped, and not read
LOAD_MODE_NONE: Final = 0  # enum llama_load_mode

Logits = npt.NDArray[np.float32]


# must outlive every call of llama.cpp
_no_log = llama.llama_log_callback(lambda _level, _text, _data: None)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model, and its adapters of attention and experts."""

    model: Any
    adapters: Sequence[Any]
    is_on_disk: bool


@contextmanager
def loaded(files: dict[str, str], *, is_on_disk: bool) -> Iterator[Loaded]:
    """Weights in the file's layout, so that both sides compute with the same kernels."""
    llama.llama_log_set(_no_log, ctypes.c_void_p(0))
    params = llama.llama_model_default_params()
    params.use_extra_bufts, params.n_gpu_layers, params.load_mode = False, 0, LOAD_MODE_NONE
    if is_on_disk:
        params.lazy_mode = LAZY_MODE_EXPERTS
    model = llama.llama_model_load_from_file(files["model"].encode(), params)
    assert model, f"llama.cpp cannot load {files['model']}"
    adapters = [
        llama.llama_adapter_lora_init(model, files[name].encode()) for name in ("attention", "experts")
    ]
    assert all(adapters), "llama.cpp cannot load the adapters"
    try:
        yield Loaded(model, adapters, is_on_disk)
    finally:
        llama.llama_model_free(model)


@contextmanager
def new_context(loaded: Loaded, *, n_seq: int, settings: dict[str, Any]) -> Iterator[Context]:
    """`settings`: "context" of a case."""
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_seq_max = N_CTX * (1 if settings["is_unified"] else n_seq), n_seq
    params.n_batch, params.n_ubatch = 128, settings["n_ubatch"]
    params.n_threads = params.n_threads_batch = settings["n_threads"]
    params.swa_full = True  # else a decode that is taken back has dropped what came before
    params.kv_unified = settings["is_unified"]
    params.flash_attn_type = int(settings["flash"])
    ctx = llama.llama_init_from_model(loaded.model, params)
    assert ctx, "llama.cpp cannot create a context"
    try:
        yield Context(ctx, loaded)
    finally:
        llama.llama_free(ctx)


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens with positions and sequences; `outputs` marks those whose logits are wanted."""

    tokens: Sequence[int]
    pos: Sequence[int]
    seq: Sequence[int]
    outputs: Sequence[bool]


class Context:
    """One llama_context."""

    def __init__(self, ctx: Any, loaded: Loaded) -> None:
        self.ctx, self.adapters, self.is_on_disk = ctx, loaded.adapters, loaded.is_on_disk
        self.memory = llama.llama_get_memory(ctx)
        self.n_vocab = int(llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(loaded.model)))
        self.is_recurrent = bool(
            llama.llama_model_is_recurrent(loaded.model) or llama.llama_model_is_hybrid(loaded.model)
        )

    def decode(self, batch: Batch) -> tuple[int, Logits]:
        """llama_decode's status, and the logits of the outputs if that is 0."""
        n = len(batch.tokens)
        raw = llama.llama_batch_init(n, 0, 1)
        raw.n_tokens = n
        for i in range(n):
            raw.token[i], raw.pos[i], raw.n_seq_id[i] = batch.tokens[i], batch.pos[i], 1
            raw.seq_id[i][0], raw.logits[i] = batch.seq[i], batch.outputs[i]
        status = int(llama.llama_decode(self.ctx, raw))
        llama.llama_batch_free(raw)
        n_rows = sum(batch.outputs) if status == 0 else 0
        if n_rows == 0:
            return status, np.empty((0, self.n_vocab), np.float32)
        logits = llama.llama_get_logits(self.ctx)
        return status, np.ctypeslib.as_array(logits, shape=(n_rows, self.n_vocab)).copy()

    def range(self, seq: int) -> tuple[int, int]:
        """First position of a sequence, and the one after its last; (0, 0): it is empty."""
        first = int(llama.llama_memory_seq_pos_min(self.memory, seq))
        end = int(llama.llama_memory_seq_pos_max(self.memory, seq)) + 1
        return max(0, first), end

    def clear(self) -> None:
        llama.llama_memory_clear(self.memory, True)

    def remove(self, seq: int, begin: int, end: int) -> bool:
        return bool(llama.llama_memory_seq_rm(self.memory, seq, begin, end))

    def save(self, seq: int) -> bytes:
        """The state of a sequence; -1: of all."""
        if seq < 0:
            size = llama.llama_state_get_size(self.ctx)
            data = (ctypes.c_uint8 * size)()
            n = llama.llama_state_get_data(self.ctx, data, size)
        else:
            size = llama.llama_state_seq_get_size(self.ctx, seq)
            data = (ctypes.c_uint8 * size)()
            n = llama.llama_state_seq_get_data(self.ctx, data, size, seq)
        return bytes(data)[:n]

    def restore(self, state: bytes, seq: int) -> int:
        """Bytes that were read; 0: it was refused."""
        data = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        if seq < 0:
            return int(llama.llama_state_set_data(self.ctx, data, len(state)))
        return int(llama.llama_state_seq_set_data(self.ctx, data, len(state), seq))

    def set_adapters(self, scales: Sequence[float]) -> None:
        active = [(a, s) for a, s in zip(self.adapters, scales, strict=True) if s]
        handles = (llama.llama_adapter_lora_p_ctypes * len(active))(*(a for a, _ in active))
        factors = (ctypes.c_float * len(active))(*(s for _, s in active))
        assert llama.llama_set_adapters_lora(self.ctx, handles, len(active), factors) == 0
