"""Greedy text with drafts against plain stock decoding: a choice may differ only at a near tie.

The width of a batch changes which kernel runs, in llama.cpp as well, so logits differ by rounding. A test
that only compared texts would either forbid that or see nothing after the first difference; this one gives
the text of the split run to plain stock decoding, token by token, and looks at every choice.
"""

from __future__ import annotations

import pytest
from near_ties import NEAR_TIE, margins

from pyspac.commands.demo import DRAFT, TARGET, demo_prompt
from pyspac.generate.options import CacheSize, RunOptions
from pyspac.generate.session import Session

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


@pytest.mark.model
@pytest.mark.parametrize("n_draft_max", [4, 8])
def test_every_choice_is_plain_decodings_or_a_near_tie(n_draft_max: int) -> None:
    prompt, output, n_both = split_run(n_draft_max)
    assert len(output) > 10
    assert n_both > 0
    below = margins(TARGET, prompt, output)
    assert below.max() < NEAR_TIE, f"token {int(below.argmax())} is {below.max():.4f} below the best"
