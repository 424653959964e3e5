"""With any controller a greedy text departs from plain decoding only at near ties."""

from __future__ import annotations

import numpy as np
import pytest

from pyspac.commands.demo import DRAFT, TARGET, demo_prompt
from pyspac.generate.llama import Context, ContextParams, Model, ModelParams
from pyspac.generate.options import CacheSize, RunOptions
from pyspac.generate.session import Session
from pyspac.speculation.manager import CONTROLLERS

NEAR_TIE = 1e-3  # of the two best logits
N_PREDICT = 96


def run(speculation: str, spec_type: str) -> tuple[list[int], list[int], list[int]]:
    """(prompt, output, draft lengths)."""
    options = RunOptions(
        model=TARGET,
        draft=DRAFT if spec_type == "draft" else None,
        spec_type=spec_type,  # type: ignore[arg-type]
        n_predict=N_PREDICT,
        n_threads=1,
        device="cpu",
        cache=CacheSize(text="25%"),
        draft_max=6,
        speculation=speculation,
    )
    with Session(options) as session:
        prompt = session.tokenize(demo_prompt())
        result = session.generate(prompt)
        return prompt, result.token_ids, [step.n_draft for step in result.metrics.steps]


def margins(prompt: list[int], output: list[int]) -> np.ndarray:
    """How far below the best logit each token of `output` is in plain stock decoding: [n_output] float32."""
    params = ModelParams(path=TARGET, n_gpu_layers=0, use_extra_bufts=False)
    with Model(params) as model, Context(model, ContextParams(n_ctx=2048, n_threads=1)) as context:
        logits = context.decode(prompt, 1)[0]
        below = []
        for token in output:
            below.append(float(logits.max() - logits[token]))
            logits = context.decode([token], 1)[0]
    return np.asarray(below, np.float32)


@pytest.mark.model
@pytest.mark.parametrize("spec_type", ["ngram", "draft"])
@pytest.mark.parametrize("speculation", CONTROLLERS)
def test_every_choice_is_plain_decodings_or_a_near_tie(speculation: str, spec_type: str) -> None:
    prompt, output, n_drafts = run(speculation, spec_type)
    assert len(output) > 10
    assert max(n_drafts) <= 6
    if speculation == "off":
        assert set(n_drafts) == {0}
    below = margins(prompt, output)
    assert below.max() < NEAR_TIE, f"token {int(below.argmax())} is {below.max():.4f} below the best"
