"""Threads of the graph beside the engine's own: one for a batch that is split, all for a prompt."""

from __future__ import annotations

from pathlib import Path

import gguf_models as models
import pytest
from llama_helpers import (
    Sequence0,
    attached_engine,
    decide_all,
    decode,
    in_new_thread,
    loaded_model,
    n_os_threads,
    new_context,
    place,
)

N_THREADS = 4


@pytest.mark.parametrize("host_kernels", ["ggml", "spac"])
def test_graph_has_one_thread_while_the_executor_works(host_kernels: str, tmp_path: Path) -> None:
    """Seen by the size of the graph's team, which grows when a graph asks for more threads."""
    path = models.write_model(tmp_path / "model.gguf", "qwen3moe")
    with (
        loaded_model(path) as model,
        new_context(model, n_threads=N_THREADS) as ctx,
        attached_engine(ctx, host_mode="executor", cache="100%", host_kernels=host_kernels) as engine,
    ):
        decide_all(engine)
        place(engine)  # nothing is left to the host: the executor itself opens no team
        tokens = Sequence0(1, models.N_VOCAB)

        def decode_and_count() -> None:
            before = n_os_threads()
            for width in (1, 5, 16):
                decode(ctx, tokens.next_batch(width))
                assert n_os_threads() == before, f"{width} tokens"
            decode(ctx, tokens.next_batch(40))
            assert n_os_threads() == before + N_THREADS - 1, "a prompt after split batches"

        in_new_thread(decode_and_count)


def test_stock_uses_all_threads_for_a_narrow_batch(tmp_path: Path) -> None:
    """The counterpart: without an engine, five tokens have the context's threads."""
    path = models.write_model(tmp_path / "model.gguf", "qwen3moe")
    with loaded_model(path) as model, new_context(model, n_threads=N_THREADS) as ctx:

        def decode_and_count() -> None:
            before = n_os_threads()
            decode(ctx, Sequence0(1, models.N_VOCAB).next_batch(5))
            assert n_os_threads() == before + N_THREADS - 1

        in_new_thread(decode_and_count)
