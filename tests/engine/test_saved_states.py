"""Saved states of stock llama.cpp: what patches/upstream/0023 promises."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_helpers import Batch, decode, llama, loaded_model, new_context

MODEL = Path(__file__).resolve().parents[2] / "pyspac/models/demo-moe.gguf"
TOKENS = [5, 17, 42, 99, 7]


def copy_to_another(memory: Any) -> tuple[int, int]:
    """The sequence and the position after it."""
    llama.llama_memory_seq_rm(memory, 1, -1, -1)
    llama.llama_memory_seq_cp(memory, 0, 1, -1, -1)
    return 1, len(TOKENS)


def move_to_the_right(memory: Any) -> tuple[int, int]:
    llama.llama_memory_seq_add(memory, 0, 0, -1, 3)
    return 0, len(TOKENS) + 3


@pytest.mark.parametrize("change", [copy_to_another, move_to_the_right])
def test_a_state_has_what_was_asked_for_before_it_was_saved(change: Callable[[Any], tuple[int, int]]) -> None:
    """Copies between sequences, and shifts, wait for the next decode."""
    with (
        loaded_model(MODEL) as model,
        new_context(model, n_seq=2) as ctx,
        new_context(model, n_seq=2) as other,
    ):
        for seq, tokens in enumerate((TOKENS, TOKENS[::-1])):
            decode(ctx, Batch(tokens, range(len(tokens)), [seq] * len(tokens)))
        seq, pos = change(llama.llama_get_memory(ctx))
        size = llama.llama_state_get_size(ctx)
        state = (ctypes.c_uint8 * size)()
        assert llama.llama_state_get_data(ctx, state, size) == size
        assert llama.llama_state_set_data(other, state, size) == size
        found, wanted = (decode(one, Batch([3], [pos], [seq])) for one in (other, ctx))
        np.testing.assert_array_equal(found, wanted)
