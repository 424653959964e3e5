"""One sequence of a model: tokens in, logits out; any number of them taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from pyspac.engine.attached import not_by_environment
from pyspac.errors import ModelError, PyspacError
from pyspac.forward.libllama import LlamaError, lib
from pyspac.forward.log import take_errors
from pyspac.forward.model import Model
from pyspac.model.device_needs import N_UBATCH


class ContextFullError(PyspacError):
    """No room in the context for the next tokens."""


Logits = npt.NDArray[np.float32]  # [n_outputs, n_vocab]

KV_SLOT_NOT_FOUND: Final = 1  # llama_decode
SEQ_ID: Final = 0


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


def check_can_rollback(path: Path, is_recurrent: bool, ctx_ptr: int, n_wanted: int) -> None:
    """Raise ModelError if so many tokens must be taken back and the model's recurrent layers cannot."""
    if is_recurrent and int(lib.llama_n_rs_seq(ctx_ptr)) < n_wanted:
        raise ModelError(
            f"{path}: the recurrent layers of this model cannot take back tokens, which verifying drafts "
            "needs; use it without drafts, or another model"
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
        c_params.n_seq_max = params.n_sequences
        c_params.n_rs_seq = params.n_rollback_max
        c_params.n_outputs_max = params.n_outputs_max
        c_params.n_threads = c_params.n_threads_batch = params.n_threads
        c_params.op_offload = params.op_offload
        c_params.no_perf = True
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
        self.rollback(self.n_past)  # what a decode left that was broken off
        self._n_held = self.n_past + n
        rc = lib.llama_decode(self.ptr, self._batch)
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
        self.n_past += n

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
        if not lib.llama_memory_seq_rm(self.memory, SEQ_ID, n_past, -1):
            raise LlamaError(
                f"{self.model.path}: this model cannot take back {self.n_past - n_past} of {self.n_past} "
                "tokens (recurrent layers); use another one"
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
