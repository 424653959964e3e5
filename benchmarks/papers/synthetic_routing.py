"""Routing made up for models whose traces are not there: a geometry in, a trace with logits and guesses out.

A router's logits are the sum of how popular an expert is in its layer, of a topic that drifts from token to
token, and of the token's own part. The shares are set so that a synthetic Qwen3-30B-A3B repeats experts about
as the recorded one does (neighbouring tokens share 0.33 of their experts, there 0.37; nine tokens use 4.1
times as many as one, there 4.2). Guesses (the next layer's router applied early, the draft's gate) are the
logits with noise on them, which makes the first choice right in 0.89 of all cases, SP-MoE measured 0.88
(section 3.2). Seeded: two runs print the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from pyspac.lab.trace import TokenStatus, Trace, TraceGeometry, softmax

MB: Final = 1_000_000
POPULAR, TOPIC, OWN = 1.0, 0.75, 1.0  # standard deviations of the parts
KEPT: Final = 0.93  # of the topic, from token to token
GUESS_NOISE: Final = 0.08  # of a logit's standard deviation


@dataclass(frozen=True, slots=True)
class Moe:
    """What the papers say of a model; the dense bytes are those that every token reads."""

    name: str
    n_layer: int
    n_expert: int
    n_used: int
    expert_mb: float
    dense_mb: float  # of a layer


MODELS: Final = {
    moe.name: moe
    for moe in (
        Moe("OLMoE-1B-7B", 16, 64, 8, 12.0, 55.0),  # SpecMD, table 3
        Moe("Mixtral-8x7B", 32, 8, 2, 336.0, 93.0),
        Moe("Qwen1.5-MoE", 24, 60, 4, 16.5, 144.0),
        Moe("Phi-3.5-MoE", 32, 16, 2, 150.0, 93.0),
        Moe("DeepSeek-Lite", 26, 64, 6, 16.0, 60.0),  # SP-MoE, table 1 and section 3.2
        Moe("Qwen3-30B-A3B", 48, 128, 8, 2.7, 9.0),  # Q4_K_M, as in the recorded trace
    )
}


@lru_cache(maxsize=8)
def make_trace(
    name: str, n_token: int = 48, n_prompt: int = 16, seed: int = 0, noise: float = GUESS_NOISE
) -> Trace:
    """Return tokens of a prompt and of decoding, with logits, next-layer guesses and draft gates."""
    moe = MODELS[name]
    rng = np.random.default_rng(seed)
    logits = _logits(moe, n_prompt + n_token, rng)
    best = np.argsort(-logits, axis=2, kind="stable")[..., : moe.n_used]
    scores = softmax(np.take_along_axis(logits, best, axis=2))
    guesses = [logits + noise * logits.std() * rng.standard_normal(logits.shape) for _ in range(2)]
    early, draft = (guess.astype(np.float16) for guess in guesses)
    n = n_prompt + n_token
    return Trace(
        geometry=_geometry(moe),
        step=np.concatenate([np.zeros(n_prompt), np.arange(1, n_token + 1)]).astype(np.int32),
        position=np.arange(n, dtype=np.int32),
        status=np.where(np.arange(n) < n_prompt, TokenStatus.PROMPT, TokenStatus.SAMPLED).astype(np.uint8),
        experts=best.astype(np.int16),
        weights=scores.astype(np.float32),
        logits=logits.astype(np.float16),
        early_logits=early[None],
        draft_logits=draft,
        source=f"synthetic {name}",
    )


def _logits(moe: Moe, n: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    shape = (moe.n_layer, moe.n_expert)
    popular = POPULAR * rng.standard_normal(shape)
    topic = TOPIC * rng.standard_normal(shape)
    rows = np.empty((n, *shape))
    for i in range(n):
        topic = KEPT * topic + (1 - KEPT**2) ** 0.5 * TOPIC * rng.standard_normal(shape)
        rows[i] = 1.0 + popular + topic + OWN * rng.standard_normal(shape)
    return rows


def _geometry(moe: Moe) -> TraceGeometry:
    return TraceGeometry(
        model=f"{moe.name} (synthetic)",
        architecture="synthetic",
        n_layer=moe.n_layer,
        n_expert=moe.n_expert,
        n_expert_used=moe.n_used,
        expert_bytes=(int(moe.expert_mb * MB),) * moe.n_layer,
        dense_bytes=(int(moe.dense_mb * MB),) * moe.n_layer,
    )
