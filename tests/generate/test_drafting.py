"""pyspac.generate.drafting: a draft model's cache follows the target."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
from fake_context import EOG, FakeContext
from hypothesis import given
from hypothesis import strategies as st

from pyspac.generate.drafting import ModelDrafter, NoDrafter
from pyspac.generate.llama import Context
from pyspac.generate.sampling import Sampler, SamplingParams, argmax


def test_no_drafter() -> None:
    drafter = NoDrafter()
    drafter.prepare([1, 2])
    assert drafter.draft([1, 2], 4).tokens == []
    drafter.accept(0)


# ---- draft model ----------------------------------------------------------------------------------


def model_drafter(context: FakeContext, temp: float = 0.0, p_min: float = 0.0) -> ModelDrafter:
    sampler = Sampler(SamplingParams(temp=temp, top_k=0, seed=4))
    return ModelDrafter(cast(Context, context), sampler, p_min)


def greedy_continuation(context: FakeContext, tokens: list[int], n: int) -> list[int]:
    sequence = list(tokens)
    for _ in range(n):
        sequence.append(argmax(context.logits_after(sequence)))
    return sequence[len(tokens) :]


def test_draft_is_the_models_own_continuation() -> None:
    context = FakeContext(seed=3, n_vocab=97)
    assert model_drafter(context).draft([1, 2, 3], 4).tokens == greedy_continuation(context, [1, 2, 3], 4)


def test_sampled_drafts_come_with_their_distributions() -> None:
    result = model_drafter(FakeContext(), temp=1.0).draft([1, 2, 3], 3)
    assert result.probs is not None
    assert len(result.probs) == len(result.tokens)
    assert all(p[token] > 0 for p, token in zip(result.probs, result.tokens, strict=True))
    assert model_drafter(FakeContext()).draft([1, 2, 3], 3).probs is None


def test_draft_ends_at_the_end_token() -> None:
    context = FakeContext(n_vocab=1)  # token 0, the end, always
    assert model_drafter(context).draft([0, 0], 4).tokens == [EOG]


@pytest.mark.parametrize("temp", [0.0, 1.0])
def test_draft_ends_where_the_model_is_not_sure(temp: float) -> None:
    """Up to there it is the draft without the limit; what is drawn does not matter."""
    unlimited = model_drafter(FakeContext(seed=3, n_vocab=97), temp).draft([1, 2, 3], 8)
    context = FakeContext(seed=3, n_vocab=97)
    tops = [
        float(softmax(context.logits_after([1, 2, 3, *unlimited.tokens[:i]])).max())
        for i in range(len(unlimited.tokens))
    ]
    p_min = sorted(tops)[len(tops) // 2]  # half of them are below
    n = next(i for i, top in enumerate(tops) if top < p_min)
    limited = model_drafter(FakeContext(seed=3, n_vocab=97), temp, p_min).draft([1, 2, 3], 8)
    assert limited.tokens == unlimited.tokens[:n]
    assert limited.probs is None or len(limited.probs) == n


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def test_draft_ends_at_the_context() -> None:
    context = FakeContext(n_ctx=6, seed=3)
    assert len(model_drafter(context).draft([1, 2, 3, 4], 4).tokens) <= 2
    assert model_drafter(FakeContext(n_ctx=6)).draft([1] * 6, 4).tokens == []
    assert model_drafter(FakeContext(n_ctx=6)).draft([1] * 8, 4).tokens == []


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(1, 6)), max_size=12),
    st.lists(st.integers(1, 6), min_size=1, max_size=10),
    st.sampled_from([0.0, 0.2, 0.5]),
)
def test_cache_is_always_a_prefix_of_the_sequence(
    steps: list[tuple[int, int, int]], prompt: list[int], p_min: float
) -> None:
    """Any mix of draft lengths (0: not asked), acceptances and other tokens of the target."""
    context = FakeContext(n_ctx=256, seed=3)
    drafter = model_drafter(context, p_min=p_min)
    drafter.prepare(prompt)
    sequence = [*prompt, 1]
    for n_draft, n_accepted, target_token in steps:
        drafted = drafter.draft(sequence, n_draft).tokens
        assert len(drafted) <= n_draft
        assert drafted == greedy_continuation(context, sequence, len(drafted))
        n_accepted = min(n_accepted, len(drafted))
        drafter.accept(n_accepted)
        sequence += [*drafted[:n_accepted], target_token]
        assert context.cache == sequence[: len(context.cache)]


def test_a_draft_that_was_never_judged_is_taken_back() -> None:
    context = FakeContext(seed=3)
    drafter = model_drafter(context)
    first = drafter.draft([1, 2, 3], 4)
    assert drafter.draft([1, 2, 3], 4) == first
    assert context.cache[:3] == [1, 2, 3]


@pytest.mark.parametrize("n_accepted", [0, 2, 4])
def test_one_token_costs_one_decode(n_accepted: int) -> None:
    """A step of 4 drafts is 4 decodes, however many tokens were accepted before."""
    context = FakeContext(n_vocab=500, seed=3)
    drafter = model_drafter(context)
    tokens = [1, 2, 3]
    drafted = drafter.draft(tokens, 4).tokens
    drafter.accept(n_accepted)
    context.widths.clear()
    drafter.draft([*tokens, *drafted[:n_accepted], 9], 4)
    assert len(context.widths) == 4
    assert context.widths[0] == (2 if n_accepted == 4 else 1)
