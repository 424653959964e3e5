"""Mask tokens: drafts out of the pass that verifies the last ones (Samragh et al., arXiv 2507.11851).

In: a context, and an adapter that llama.cpp applies to masks alone. Out: logits of the sequence's next
tokens, and of the masks behind each of them. A pass computes the last token and n drafts (the anchors), and
behind each anchor a group of k masks, which predict what comes after the token that follows it: whichever
draft is the last that holds, its group has the next drafts.

    batch      x0 x1 .. xn | m1 .. mk of x0 | m1 .. mk of x1 | ...       x: anchors, m: masks
    position   p  p+1 p+n  | p+1 .. p+k     | p+2 .. p+1+k   | ...

A mask sees the sequence up to its anchor and the masks before it in its group; nobody else sees it. Group j
is llama.cpp's sequence 1 + j, which shares the cells of the sequence up to its anchor (a unified cache), so
that is what attention does by itself. Masks are gone when the pass is over.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple, Self

from pyspac._native import check, ffi
from pyspac._native import lib as spac
from pyspac.errors import ModelError
from pyspac.generate.libllama import LlamaError, lib
from pyspac.generate.llama import SEQ_ID, Context, Logits, take_errors
from pyspac.speculation.cost_table import masked_width

_FIRST_GROUP: Final = 1  # sequence id
_NO_GROUP: Final = -1


class Entry(NamedTuple):
    """One token of a batch."""

    token: int
    pos: int
    sequences: tuple[int, ...]


def layout(tokens: Sequence[int], n_past: int, mask_ids: Sequence[int]) -> list[Entry]:
    """The batch of a pass: anchors first, so that their cells are the sequence's next ones, then each group.

    An anchor belongs to the sequence, and to the groups of itself and of those behind it.
    """
    n = len(tokens)
    groups = range(_FIRST_GROUP, _FIRST_GROUP + n) if mask_ids else range(0)
    anchors = [Entry(token, n_past + i, (SEQ_ID, *groups[i:])) for i, token in enumerate(tokens)]
    masks = (
        Entry(mask, n_past + i + k, (group,))
        for i, group in enumerate(groups)
        for k, mask in enumerate(mask_ids, start=1)
    )
    return list(chain(anchors, masks))


class MaskedDecoder:
    """The passes with masks of one context, whose `ContextParams.n_groups` is the draft length + 1."""

    def __init__(self, context: Context, path: Path, mask_ids: Sequence[int]) -> None:
        """`path`: the adapter; `mask_ids`: a group's masks in their order, of which a pass may have fewer.

        Raises ModelError if llama.cpp refuses the adapter.
        """
        self.context = context
        self.mask_ids = tuple(mask_ids)
        self.count_first: Callable[[int], None] = _count_all  # an engine's, which learns nothing from masks
        n_groups = context.params.n_groups
        self._shared = [0] * n_groups  # tokens of the sequence that each group has
        _set_adapter(context, path)
        self._batch = lib.llama_batch_init(masked_width(n_groups - 1, len(mask_ids)), 0, 1 + n_groups)

    def truncate(self, n_past: int) -> None:
        """The sequence was taken back to `n_past` tokens, and goes on otherwise."""
        self._shared = [min(n, n_past) for n in self._shared]

    def decode(self, tokens: Sequence[int], n_masks: int) -> tuple[Logits, Logits]:
        """Append `tokens`, with `n_masks` masks behind each.

        Returns views, valid until the next decode: [n_tokens, n_vocab] and [n_tokens, n_masks, n_vocab].
        Raises ContextFullError, LlamaError.
        """
        n, n_past = len(tokens), self.context.n_past
        self._write(layout(tokens, n_past, self.mask_ids[:n_masks]))
        self._join(n, n_past)
        self.count_first(n)
        self._set_gate(_FIRST_GROUP)
        try:
            self.context.compute(self._batch, n)
        finally:
            self._set_gate(_NO_GROUP)
            self.count_first(0)
            self._leave(n, n_past)
        rows = self.context.logits(masked_width(n - 1, n_masks))
        return rows[:n], rows[n:].reshape(n, n_masks, rows.shape[1])

    def _write(self, entries: Sequence[Entry]) -> None:
        """Fill the batch; all entries want logits."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for i, entry in enumerate(entries):
            batch.token[i], batch.pos[i], batch.logits[i] = entry.token, entry.pos, 1
            batch.n_seq_id[i] = len(entry.sequences)
            for s, sequence in enumerate(entry.sequences):
                batch.seq_id[i][s] = sequence

    def _join(self, n_groups: int, n_past: int) -> None:
        """Have the groups share what the sequence has got since they last did: only notes in the cache."""
        for i in range(n_groups):
            lib.llama_memory_seq_cp(self.context.memory, SEQ_ID, _FIRST_GROUP + i, self._shared[i], n_past)
            self._shared[i] = n_past

    def _leave(self, n_groups: int, n_past: int) -> None:
        """Forget the masks, and who saw which anchor."""
        for i in range(n_groups):
            lib.llama_memory_seq_rm(self.context.memory, _FIRST_GROUP + i, n_past, -1)

    def _set_gate(self, first_sequence: int) -> None:
        check(
            spac.spac_set_mask_sequences(ffi.cast("struct llama_context *", self.context.ptr), first_sequence)
        )

    def close(self) -> None:
        """Before the context."""
        if self._batch is not None:
            lib.llama_batch_free(self._batch)
            self._batch = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def _set_adapter(context: Context, path: Path) -> None:
    """It is freed with the model."""
    adapter = lib.llama_adapter_lora_init(context.model.ptr, os.fsencode(path))
    if not adapter:
        raise ModelError(
            f"{path}: llama.cpp cannot load this adapter{take_errors()}; train it on the "
            "model that it is used with"
        )
    adapters, scales = (lib.llama_adapter_lora_p_ctypes * 1)(adapter), (ctypes.c_float * 1)(1.0)
    if lib.llama_set_adapters_lora(context.ptr, adapters, 1, scales) != 0:
        raise LlamaError(f"{path}: llama.cpp cannot use this adapter{take_errors()}; convert it again")


def _count_all(n_tokens: int) -> None:
    """Stands in where there is no engine."""
