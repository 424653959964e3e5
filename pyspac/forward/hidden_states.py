"""Hidden states of a model: the inputs of some of its layers, of the last batch (`spac_hidden_states_*`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from pyspac._native import check, ffi, lib
from pyspac.errors import PyspacError

if TYPE_CHECKING:
    from pyspac.forward.context import Context

States = npt.NDArray[np.float32]  # [n_tokens, n_layers, n_embd]


class HiddenStates:
    """Of an empty context, whose later batches keep them; close it before the context."""

    def __init__(self, context: Context, layers: Sequence[int], n_embd: int) -> None:
        """`layers`: whose inputs; `n_embd`: their width, of the model's header.

        The architecture has to be one of `STATE_ARCHITECTURES`: llama.cpp aborts at others. Raises
        EngineError for a layer that is not there, or a context that holds tokens.
        """
        self._shape = (len(layers), n_embd)
        self._ptr: Any = None
        out = ffi.new("spac_hidden_states **")
        ctx = ffi.cast("struct llama_context *", context.ptr)
        check(lib.spac_hidden_states_open(ctx, ffi.new("int32_t[]", layers), len(layers), out))
        self._ptr = out[0]

    def read(self, n_tokens: int) -> States:
        """Of the last batch's first tokens, in its order. Raises EngineError where nothing was computed."""
        if self._ptr is None:
            raise PyspacError("these hidden states are closed; open others")
        rows = np.empty((n_tokens, *self._shape), np.float32)
        check(lib.spac_hidden_states_read(self._ptr, n_tokens, ffi.from_buffer("float[]", rows)))
        return rows

    def close(self) -> None:
        if self._ptr is not None:
            lib.spac_hidden_states_close(self._ptr)
            self._ptr = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()
