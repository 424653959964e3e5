"""Routers are found in the graphs of every architecture, and asked early without a change of the logits."""

from __future__ import annotations

import time
from pathlib import Path

import gguf_models as models
import numpy as np
import pytest

from pyspac.engine.engine import Engine, EngineParams
from pyspac.generate import llama

TOKENS = range(1, 7)


def load(path: Path) -> llama.Model:
    return llama.Model(llama.ModelParams(path=path, n_gpu_layers=0, use_extra_bufts=False))


def decode(context: llama.Context) -> list[np.ndarray]:
    return [context.decode([token], 1)[0].copy() for token in TOKENS]


@pytest.mark.parametrize("name", [name for name in models.ARCHITECTURES if name != models.NOT_SPLIT])
def test_a_router_is_asked_early(name: str, tmp_path: Path) -> None:
    path = models.write_model(tmp_path / "model.gguf", name, models.MIXED_TYPES)
    params = llama.ContextParams(n_ctx=256, n_outputs_max=1, n_threads=1)
    with load(path) as model:
        with llama.Context(model, params) as context:
            plain = decode(context)
        with llama.Context(model, params) as context:
            assert context.ptr is not None
            settings = EngineParams(device="cpu", cache="50%", next_layer=1)
            with Engine.attach(context.ptr, settings) as engine:
                assert all(map(np.array_equal, decode(context), plain))
                deadline = time.monotonic() + 20.0
                while engine.board.ahead[0]["n_inputs"] == 0:  # the thread that asks works beside the graph
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
