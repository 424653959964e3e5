"""A thin, typed wrapper of llama.cpp: model, vocabulary, context; tokens in, logits out.

It uses llama-cpp-python's low-level bindings only, on the project's own `libllama` (`pyspac._native` points
the bindings at it, so it is imported first). Nothing here knows about experts or speculation.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from pyspac.engine.attached import not_by_environment
from pyspac.errors import ModelError, PyspacError
from pyspac.forward.log import set_verbose as set_verbose
from pyspac.forward.log import take_errors as take_errors
from pyspac.generate.libllama import LlamaError, lib
from pyspac.generate.vocab import Vocab


class ContextFullError(PyspacError):
    """No room in the context for the next tokens."""


Logits = npt.NDArray[np.float32]  # [n_outputs, n_vocab]
Progress = Callable[[float], bool]  # gets 0.0 .. 1.0; False stops the loading

# the tensors that llama.cpp's --cpu-moe keeps on the host (common/common.h, LLM_FFN_EXPS_REGEX)
EXPERT_TENSORS: Final = rb"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
ALL_TENSORS: Final = rb"."
ALL_LAYERS: Final = -1
LOG_LEVEL_ERROR: Final = 4  # enum ggml_log_level
LAZY_MODE_AUTO: Final = 1  # enum llama_lazy_mode
LAZY_MODE_EXPERTS: Final = 3  # experts are mapped, and not read
LOAD_MODE_AUTO: Final = -1  # enum llama_load_mode: mmap
LOAD_MODE_NONE: Final = 0  # read into memory, which is pinned where the device can
KV_SLOT_NOT_FOUND: Final = 1  # llama_decode
SEQ_ID: Final = 0
ALL_SEQUENCES: Final = -1


class _BuftOverride(ctypes.Structure):
    """struct llama_model_tensor_buft_override, for which the bindings have no class."""

    _fields_ = [("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p)]


lib.llama_backend_init()


def system_info() -> str:
    """The instruction sets and backends that libllama was built with."""
    return str(lib.llama_print_system_info().decode())


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParams:
    """How to load a model; handles as in ggml."""

    path: Path
    n_gpu_layers: int = 0  # ALL_LAYERS: all
    devices: tuple[int, ...] = ()  # ggml_backend_dev_t; (): the CPU alone
    tensor_split: tuple[float, ...] = ()  # shares of the layers, of each device; (): by free memory
    buft: int | None = None  # ggml_backend_buffer_type_t for the tensors below; None: with their layer
    buft_tensors: bytes = EXPERT_TENSORS  # a regular expression
    use_extra_bufts: bool = True  # False: weights keep the file's layout, which bit-exact comparison needs
    load_mode: int = LOAD_MODE_AUTO
    lazy_mode: int = LAZY_MODE_AUTO
    load_heads: bool = False  # those that predict further tokens (NextN, MTP), too


def model_fields(params: ModelParams, keep: list[Any]) -> dict[str, Any]:
    """Fields of llama_model_params; what they point to is added to `keep`, until the model is loaded."""

    def pointer(array: Any) -> int:
        keep.append(array)
        return ctypes.addressof(array)

    fields: dict[str, Any] = {
        "n_gpu_layers": params.n_gpu_layers,
        "use_extra_bufts": params.use_extra_bufts,
        "load_mode": params.load_mode,
        "lazy_mode": params.lazy_mode,
        "load_mtp": params.load_heads,
        "devices": pointer((ctypes.c_void_p * (len(params.devices) + 1))(*params.devices, None)),
    }
    if params.tensor_split:
        shares = (ctypes.c_float * lib.llama_max_devices())(*params.tensor_split)
        keep.append(shares)
        fields["tensor_split"] = ctypes.cast(shares, ctypes.POINTER(ctypes.c_float))
    if params.buft is not None:
        rows = (_BuftOverride(params.buft_tensors, params.buft), _BuftOverride(None, None))
        fields["tensor_buft_overrides"] = pointer((_BuftOverride * len(rows))(*rows))
    return fields


class Model:
    """A loaded model; close it after its contexts."""

    def __init__(self, params: ModelParams, progress: Progress | None = None) -> None:
        """Raises ModelError if llama.cpp refuses the file, KeyboardInterrupt if `progress` stopped it."""
        self.path = params.path
        self._is_cancelled = False
        self._keep: list[Any] = []  # what llama.cpp reads through pointers while it loads
        self.ptr: int | None = lib.llama_model_load_from_file(
            os.fsencode(params.path), self._c_params(params, progress)
        )
        self._keep.clear()
        if self._is_cancelled:
            self.close()
            raise KeyboardInterrupt
        if not self.ptr:
            raise ModelError(
                f"{params.path}: llama.cpp cannot load this model{take_errors()}; "
                "check that the architecture is supported and that memory suffices"
            )
        self.vocab = Vocab(self.ptr)

    def _c_params(self, params: ModelParams, progress: Progress | None) -> Any:
        c_params = lib.llama_model_default_params()
        for name, value in model_fields(params, self._keep).items():
            setattr(c_params, name, value)
        if progress is not None:
            c_params.progress_callback = self._progress_callback(progress)
        return c_params

    def _progress_callback(self, progress: Progress) -> Any:
        def report(fraction: float, _user_data: Any) -> bool:
            self._is_cancelled = not progress(fraction)
            return not self._is_cancelled

        callback = lib.llama_progress_callback(report)
        self._keep.append(callback)
        return callback

    @property
    def is_recurrent(self) -> bool:
        """Some or all layers keep a state instead of a key-value cache."""
        return bool(lib.llama_model_is_recurrent(self.ptr) or lib.llama_model_is_hybrid(self.ptr))

    def close(self) -> None:
        if self.ptr:
            lib.llama_model_free(self.ptr)
            self.ptr = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


# ---------------------------------------------------------------------------------------------- context


N_UBATCH: Final = 512  # llama.cpp's own default


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextParams:
    """Sizes in tokens."""

    n_ctx: int
    n_ubatch: int = N_UBATCH  # longest piece of a prompt processed at once
    n_outputs_max: int = 1  # most rows of logits of one decode; the draft length + 1
    n_rollback_max: int = 0  # most tokens taken back at once: recurrent layers keep as many states
    n_sequences: int = 1  # of `n_ctx` tokens each; more than one are for `Sequences`
    n_threads: int = 1
    op_offload: bool = True  # False: never send work of host weights to a device
    target: Context | None = None  # of a draft that reads its hidden states
    is_head: bool = False  # the model's head that predicts further tokens (NextN, MTP), not the model
    n_groups: int = 0  # of mask tokens, at most, that a batch has beside the sequence; see masks.py


def check_can_rollback(path: Path, is_recurrent: bool, ctx_ptr: int, n_wanted: int) -> None:
    """Raise ModelError if so many tokens must be taken back and the model's recurrent layers cannot."""
    if is_recurrent and int(lib.llama_n_rs_seq(ctx_ptr)) < n_wanted:
        raise ModelError(
            f"{path}: the recurrent layers of this model cannot take back rejected tokens, "
            "which drafting needs; run it without drafts (--spec-type none)"
        )


class Context:
    """One sequence: its key-value cache, which holds `n_past` tokens, and the logits of the last decode."""

    def __init__(self, model: Model, params: ContextParams) -> None:
        """Raises LlamaError if it cannot be created, ModelError if it cannot take back tokens."""
        self.model = model
        self.params = params
        self._batch = lib.llama_batch_init(params.n_ubatch, 0, 1)
        with not_by_environment():
            self.ptr: int | None = lib.llama_init_from_model(model.ptr, self._c_params())
        if not self.ptr:
            lib.llama_batch_free(self._batch)
            raise LlamaError(
                f"{model.path}: a context of {params.n_ctx} tokens cannot be created{take_errors()}; lower -c"
            )
        try:
            check_can_rollback(model.path, model.is_recurrent, self.ptr, params.n_rollback_max)
        except ModelError:
            self.close()
            raise
        self.n_ctx = params.n_ctx  # llama.cpp rounds up to a multiple of 256
        self.n_past = 0
        self.why_failed: Callable[[], str] = str  # what an engine knows of a decode that failed; "": nothing
        self._n_held = 0  # positions that its memory may hold: more where a decode was broken off
        self.memory = lib.llama_get_memory(self.ptr)
        self._fill_constant_columns()

    def _c_params(self) -> Any:
        params = self.params
        c_params = lib.llama_context_default_params()
        c_params.n_ctx = params.n_ctx * params.n_sequences
        c_params.n_batch = params.n_ubatch
        c_params.n_ubatch = params.n_ubatch
        c_params.n_seq_max = params.n_sequences + params.n_groups
        c_params.kv_unified = params.n_groups > 0  # so that sequences can share cells
        c_params.n_rs_seq = params.n_rollback_max
        c_params.n_outputs_max = params.n_outputs_max
        c_params.n_threads = c_params.n_threads_batch = params.n_threads
        c_params.op_offload = params.op_offload
        c_params.no_perf = True
        if params.is_head:
            c_params.ctx_type = lib.LLAMA_CONTEXT_TYPE_MTP
        if params.target is not None:
            c_params.ctx_other = params.target.ptr
        return c_params

    @property
    def room_advice(self) -> str:
        """What to do where the context is full."""
        is_longest = self.n_ctx >= int(lib.llama_model_n_ctx_train(self.model.ptr))
        return "the model was trained with no more" if is_longest else "raise -c"

    def _fill_constant_columns(self) -> None:
        for i in range(self.params.n_ubatch):
            self._batch.n_seq_id[i] = 1
            self._batch.seq_id[i][0] = SEQ_ID
        shape = (self.params.n_ubatch,)
        self._tokens = np.ctypeslib.as_array(self._batch.token, shape)
        self._pos = np.ctypeslib.as_array(self._batch.pos, shape)
        self._wants_logits = np.ctypeslib.as_array(self._batch.logits, shape)

    def decode(self, tokens: Sequence[int], n_outputs: int = 1) -> Logits:
        """Append `tokens` to the sequence; logits of the last `n_outputs` of them.

        Returns a view of [n_outputs, n_vocab] float32, valid until the next decode. At most n_ubatch tokens
        are computed at once; the outputs must all be in the last piece. Raises ContextFullError, LlamaError.
        """
        assert len(tokens) >= n_outputs <= self.params.n_outputs_max
        if self.n_past + len(tokens) > self.n_ctx:
            raise ContextFullError(
                f"the context is full: {self.n_past} tokens are in it and {len(tokens)} more do not fit into "
                f"n_ctx = {self.n_ctx}; {self.room_advice}"
            )
        n_ubatch = self.params.n_ubatch
        n_last = (
            (len(tokens) - 1) // n_ubatch * n_ubatch if n_outputs <= 1 else max(0, len(tokens) - n_ubatch)
        )
        for first in range(0, n_last, n_ubatch):
            self._decode_piece(tokens[first : min(first + n_ubatch, n_last)], 0)
        self._decode_piece(tokens[n_last:], n_outputs)
        return self.logits(n_outputs)

    def _decode_piece(self, tokens: Sequence[int], n_outputs: int) -> None:
        n = len(tokens)
        self._tokens[:n] = tokens
        self._pos[:n] = np.arange(self.n_past, self.n_past + n)
        self._wants_logits[: n - n_outputs] = 0
        self._wants_logits[n - n_outputs : n] = 1
        self._batch.n_tokens = n
        self.compute(self._batch, n)

    def compute(self, batch: Any, n_new: int) -> None:
        """Decode a llama_batch, of which the first `n_new` tokens are appended to the sequence.

        Raises ContextFullError, LlamaError.
        """
        n = batch.n_tokens
        self.rollback(self.n_past)
        self._n_held = self.n_past + n_new
        rc = lib.llama_decode(self.ptr, batch)
        if rc == KV_SLOT_NOT_FOUND:
            raise ContextFullError(
                f"the context is full: no room for {n} tokens after {self.n_past} "
                f"(n_ctx = {self.n_ctx}); {self.room_advice}"
            )
        if rc != 0 and (why := self.why_failed()):
            raise LlamaError(f"computing {n} tokens at position {self.n_past} failed: {why}")
        if rc != 0:
            raise LlamaError(
                f"llama.cpp failed to compute {n} tokens at position {self.n_past}, code {rc}"
                f"{take_errors()}; run with --verbose to see its log"
            )
        self.n_past += n_new

    def logits(self, n_outputs: int) -> Logits:
        """Of the last decode, [n_outputs, n_vocab]: a view, valid until the next one."""
        shape = (n_outputs, self.model.vocab.n_tokens)
        if n_outputs == 0:
            return np.empty(shape, np.float32)
        return np.ctypeslib.as_array(lib.llama_get_logits(self.ptr), shape)

    def rollback(self, n_past: int) -> None:
        """Take back all tokens from position `n_past` on. Raises LlamaError if the model cannot."""
        assert n_past <= self.n_past
        if n_past == self._n_held:
            return
        sequence = ALL_SEQUENCES if self.params.n_groups else SEQ_ID
        if not lib.llama_memory_seq_rm(self.memory, sequence, n_past, -1):
            raise LlamaError(
                f"{self.model.path}: this model cannot take back {self.n_past - n_past} of {self.n_past} "
                "tokens (recurrent layers), which speculation needs; run with --spec-type none"
            )
        self.n_past = self._n_held = n_past

    def clear(self) -> None:
        """Forget everything."""
        lib.llama_memory_clear(self.memory, True)
        self.n_past = self._n_held = 0

    def close(self) -> None:
        if self.ptr:
            lib.llama_free(self.ptr)
            lib.llama_batch_free(self._batch)
            self.ptr = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()
