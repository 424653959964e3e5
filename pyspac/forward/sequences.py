"""Several sequences of one context, all of the same length: rows of tokens in, one batch computed.

Only measurements need them: a run has one sequence, and a server is llama-server.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import numpy as np

from pyspac.forward.libllama import LlamaError, lib

if TYPE_CHECKING:
    from pyspac.forward.context import Context

Rows = Sequence[Sequence[int]]  # [n_sequences, n_tokens]


class Sequences:
    """Use it instead of the context's own `decode`, and close it before the context."""

    def __init__(self, context: Context) -> None:
        """`context`: an empty one; its `params.n_sequences` are all there can be."""
        self.context = context
        self.n_past = 0  # tokens of every sequence
        n = context.params.n_ubatch
        self._batch = lib.llama_batch_init(n, 0, 1)
        arrays = (self._batch.token, self._batch.pos, self._batch.logits, self._batch.n_seq_id)
        self._tokens, self._pos, self._wants_logits, n_seq_id = (
            np.ctypeslib.as_array(array, (n,)) for array in arrays
        )
        n_seq_id[:] = 1

    def read(self, rows: Rows) -> None:
        """Append a row to every sequence, as a prompt: without logits, in as few batches as there may be."""
        n_piece = self.context.params.n_ubatch // len(rows)
        for first in range(0, len(rows[0]), n_piece):
            self.decode([row[first : first + n_piece] for row in rows], has_logits=False)

    def decode(self, rows: Rows, *, has_logits: bool = True) -> None:
        """Append a row to each of the first sequences in one batch; `has_logits`: of every token.

        Where these are not all sequences, take them back before the others are used. Raises LlamaError.
        """
        assert len(rows) <= self.context.params.n_sequences
        self._fill(rows, has_logits)
        rc = lib.llama_decode(self.context.ptr, self._batch)
        lib.llama_synchronize(self.context.ptr)  # a device may still be at work
        if rc != 0:
            raise LlamaError(
                f"llama.cpp failed to compute {len(rows)} sequences of {len(rows[0])} tokens at position "
                f"{self.n_past}, code {rc}; run with --verbose to see its log"
            )
        self.n_past += len(rows[0])

    def _fill(self, rows: Rows, has_logits: bool) -> None:
        n_tokens = len(rows[0])
        for i, row in enumerate(rows):
            cells = slice(i * n_tokens, (i + 1) * n_tokens)
            self._tokens[cells] = row
            self._pos[cells] = np.arange(self.n_past, self.n_past + n_tokens)
            for k in range(cells.start, cells.stop):
                self._batch.seq_id[k][0] = i
        self._wants_logits[: n_tokens * len(rows)] = has_logits
        self._batch.n_tokens = n_tokens * len(rows)

    def rollback(self, n_past: int) -> None:
        """Take back all tokens from position `n_past` on. Raises LlamaError if the model cannot."""
        for i in range(self.context.params.n_sequences):
            if not lib.llama_memory_seq_rm(self.context.memory, i, n_past, -1):
                raise LlamaError(
                    f"{self.context.model.path}: this model cannot take back {self.n_past - n_past} of "
                    f"{self.n_past} tokens (recurrent layers); measure another one"
                )
        self.n_past = n_past

    def close(self) -> None:
        lib.llama_batch_free(self._batch)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()
