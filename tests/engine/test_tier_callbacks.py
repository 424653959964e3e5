"""An expert that cannot be read ends the forward, whatever abort callback the program has set, and when."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import gguf_models as models
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from llama_helpers import (
    Sequence0,
    assert_same_bits,
    attached_engine,
    decode,
    llama,
    loaded_model,
    new_context,
)

from pyspac.forward.model import LAZY_MODE_EXPERTS, LOAD_MODE_NONE

ABORTED = "llama_decode returned 2"
ENGINES: dict[str, dict[str, Any]] = {
    "no device": {"device": "none", "host_mode": "auto", "cache": "0"},
    "in-graph": {"host_mode": "in-graph", "cache": "30%"},
    "executor": {"host_mode": "executor", "cache": "30%"},
}


class Program:
    """An abort callback that counts how often it is asked, and stops a forward when told to."""

    def __init__(self) -> None:
        self.n_asked = 0
        self.stops = False
        self.callback = llama.ggml_abort_callback(self._ask)  # must outlive the context

    def _ask(self, _data: Any) -> bool:
        self.n_asked += 1
        return self.stops

    def set(self, ctx: Any) -> None:
        llama.llama_set_abort_callback(ctx, self.callback, ctypes.c_void_p(0))

    def is_asked(self, ctx: Any) -> bool:
        """While all is well, and it can stop a forward."""
        before = self.n_asked
        assert np.isfinite(decode_some(ctx)).all()
        was_asked = self.n_asked > before
        self.stops = True
        with pytest.raises(AssertionError, match=ABORTED):
            decode_some(ctx)
        self.stops = False
        return was_asked


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return models.write_model(tmp_path / "model.gguf", "qwen3moe", [(Type.Q4_K, Type.Q4_K, Type.Q6_K)])


@contextmanager
def on_disk(path: Path) -> Iterator[Any]:
    with (
        loaded_model(path, lazy_mode=LAZY_MODE_EXPERTS, load_mode=LOAD_MODE_NONE) as model,
        new_context(model, n_threads=2) as ctx,
    ):
        yield ctx


def decode_some(ctx: Any) -> np.ndarray:
    """From the beginning: a prompt, and one token behind it."""
    llama.llama_memory_clear(llama.llama_get_memory(ctx), True)
    tokens = Sequence0(1, models.N_VOCAB)
    return np.concatenate([decode(ctx, tokens.next_batch(width)) for width in (40, 16, 1)])


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("when", ["never", "before", "after"])
def test_a_failed_read_ends_the_forward(path: Path, name: str, when: str) -> None:
    content = path.read_bytes()
    program = Program()
    with on_disk(path) as ctx, ExitStack() as stack:
        if when == "before":
            program.set(ctx)
        engine = stack.enter_context(attached_engine(ctx, ram_bytes=3 << 20, **ENGINES[name]))
        if when == "after":
            program.set(ctx)
        expected = decode_some(ctx)
        for _ in range(2):
            os.truncate(path, len(content) // 3)
            with pytest.raises(AssertionError, match=ABORTED):
                decode_some(ctx)
            assert "the file has become shorter" in engine.tier().error
            path.write_bytes(content)
            assert_same_bits(decode_some(ctx), expected, "after the failure")
        assert when == "never" or program.is_asked(ctx)
        stack.close()  # the engine goes, and the callback is as it was
        assert when == "never" or program.is_asked(ctx)


def test_a_callback_taken_away(path: Path) -> None:
    """None of the program's any more, the engine's is still there; none when it goes."""
    content = path.read_bytes()
    program = Program()
    with on_disk(path) as ctx, ExitStack() as stack:
        program.set(ctx)
        stack.enter_context(attached_engine(ctx, ram_bytes=3 << 20, **ENGINES["no device"]))
        llama.llama_set_abort_callback(ctx, llama.ggml_abort_callback(), ctypes.c_void_p(0))
        os.truncate(path, len(content) // 3)
        with pytest.raises(AssertionError, match=ABORTED):
            decode_some(ctx)
        path.write_bytes(content)
        decode_some(ctx)
        stack.close()
        decode_some(ctx)
    assert program.n_asked == 0
