"""Routers are found in the graphs of every architecture, and asked early without a change of the logits."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import gguf_models as models
import numpy as np
import pytest

from pyspac.engine.engine import Engine, EngineParams
from pyspac.forward.context import Context, ContextParams
from pyspac.forward.model import Model, ModelParams

TOKENS = range(1, 7)


def load(path: Path) -> Model:
    return Model(ModelParams(path=path, n_gpu_layers=0, use_extra_bufts=False))


def decode(context: Context) -> list[np.ndarray]:
    return [context.decode([token], 1)[0].copy() for token in TOKENS]


@pytest.mark.parametrize("name", [name for name in models.ARCHITECTURES if name != models.NOT_SPLIT])
def test_a_router_is_asked_early(name: str, tmp_path: Path) -> None:
    path = models.write_model(tmp_path / "model.gguf", name, models.MIXED_TYPES)
    params = ContextParams(n_ctx=256, n_outputs_max=1, n_threads=1)
    with load(path) as model:
        with Context(model, params) as context:
            plain = decode(context)
        with Context(model, params) as context:
            assert context.ptr is not None
            settings = EngineParams(device="cpu", cache="50%", next_layer=1)
            with Engine.attach(context.ptr, settings) as engine:
                assert all(map(np.array_equal, decode(context), plain))
                deadline = time.monotonic() + 20.0
                while engine.board.ahead[0]["n_inputs"] == 0:  # the thread that asks works beside the graph
                    assert time.monotonic() < deadline
                    time.sleep(0.01)


def test_the_cutoff_of_one_layer_is_that_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing lies between a first and a last MoE layer then, whose time could be taken."""
    known = models.ARCHITECTURES["qwen3moe"]
    monkeypatch.setitem(models.ARCHITECTURES, "qwen3moe", replace(known, shape=models.Shape(n_layer=1)))
    path = models.write_model(tmp_path / "model.gguf", "qwen3moe")
    params = ContextParams(n_ctx=256, n_outputs_max=3, n_threads=1)
    with load(path) as model, Context(model, params) as target, Context(model, params) as draft:
        assert target.ptr is not None
        assert draft.ptr is not None
        with Engine.attach(target.ptr, EngineParams(device="cpu", cache="50%")) as engine:
            engine.watch_draft(draft.ptr)
            for first in range(1, 64, 3):
                step = [first, first + 1, first + 2]
                for token in step[:-1]:
                    draft.decode([token], 1)
                target.decode(step, 3)
                draft.decode(step[-1:], 1)  # it has seen the same
                if engine.board.ahead[1]["cutoff_layer"] == 1:  # on a busy machine, later
                    return
            pytest.fail("no time of the draft model was taken")
