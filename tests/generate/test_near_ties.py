"""Greedy text with drafts against plain stock decoding: a choice may differ only at a near tie.

The width of a batch changes which kernel runs, in llama.cpp as well, so logits differ by rounding. A test
that only compared texts would either forbid that or see nothing after the first difference; this one gives
the text of the split run to plain stock decoding, token by token, and looks at every choice.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pyspac.commands.demo import DRAFT, TARGET, demo_prompt
from pyspac.generate.llama import Context, ContextParams, Model, ModelParams
from pyspac.generate.options import CacheSize, RunOptions
from pyspac.generate.session import Session

NEAR_TIE = 1e-3  # of the two best logits
N_PREDICT = 96


def split_run(n_draft_max: int) -> tuple[list[int], list[int], int]:
    """(prompt, output, passes with both sides at work) of a greedy split run with drafts."""
    options = RunOptions(
        model=TARGET,
        draft=DRAFT,
        n_predict=N_PREDICT,
        device="cpu",
        cache=CacheSize(text="25%"),
        draft_max=n_draft_max,
    )
    with Session(options) as session:
        prompt = session.tokenize(demo_prompt())
        output = session.generate(prompt).token_ids
        assert session.split is not None
        return prompt, output, session.split.experts_dict()["n_steps_with_both"]


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


@pytest.mark.model
@pytest.mark.parametrize("n_draft_max", [4, 8])
def test_every_choice_is_plain_decodings_or_a_near_tie(n_draft_max: int) -> None:
    prompt, output, n_both = split_run(n_draft_max)
    assert len(output) > 10
    assert n_both > 0
    below = margins(TARGET, prompt, output)
    assert below.max() < NEAR_TIE, f"token {int(below.argmax())} is {below.max():.4f} below the best"
