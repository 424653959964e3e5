"""How near a text is to plain decoding's: rounding, which differs from width to width, decides near ties."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np

from pyspac.engine.engine import Engine
from pyspac.engine.params import EngineParams
from pyspac.forward.context import Context, ContextParams
from pyspac.forward.model import Model, ModelParams

NEAR_TIE = 1e-3  # of the two best logits


def margins(model: Path, prompt: list[int], output: list[int], *, is_own: bool = False) -> np.ndarray:
    """How far below the best logit each token of `output` is in plain decoding: [n_output] float32.

    `is_own`: by the engine's own kernels; else by llama.cpp's.
    """
    params = ModelParams(path=model, n_gpu_layers=0, use_extra_bufts=False)
    with ExitStack() as stack:
        loaded = stack.enter_context(Model(params))
        context = stack.enter_context(Context(loaded, ContextParams(n_ctx=2048, n_threads=2)))
        if is_own:
            stack.enter_context(Engine.attach(context.ptr, EngineParams(device="none", host_kernels="spac")))
        logits = context.decode(prompt, 1)[0]
        below = []
        for token in output:
            below.append(float(logits.max() - logits[token]))
            logits = context.decode([token], 1)[0]
    return np.asarray(below, np.float32)
