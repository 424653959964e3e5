"""How near a text is to plain decoding's: rounding, which differs from width to width, decides near ties."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pyspac.forward.context import Context, ContextParams
from pyspac.forward.model import Model, ModelParams

NEAR_TIE = 1e-3  # of the two best logits


def margins(model: Path, prompt: list[int], output: list[int]) -> np.ndarray:
    """How far below the best logit each token of `output` is in plain decoding: [n_output] float32."""
    params = ModelParams(path=model, n_gpu_layers=0, use_extra_bufts=False)
    with Model(params) as loaded, Context(loaded, ContextParams(n_ctx=2048, n_threads=2)) as context:
        logits = context.decode(prompt, 1)[0]
        below = []
        for token in output:
            below.append(float(logits.max() - logits[token]))
            logits = context.decode([token], 1)[0]
    return np.asarray(below, np.float32)
