"""Sampled text with each drafter has the distribution of plain decoding: random models of four tokens."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import gguf_models
import numpy as np
import pytest
from mask_adapters import write_adapter
from test_sampling import chi_square

from pyspac.generate.llama import Context, ContextParams, Model, ModelParams
from pyspac.generate.options import RunOptions
from pyspac.generate.sampling import Sampler, SamplingParams
from pyspac.generate.session import Session
from pyspac.model import spec_types

TOKENS = range(10, 14)  # the others are never drawn
N_TRIALS = 1000
PLAIN = SamplingParams(temp=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)
LIMIT = 44.3  # 99.99 % quantile of chi-square with 15 degrees of freedom


def write(path: Path, seed: int) -> Path:
    """A model whose output's biases leave four tokens."""
    architecture = gguf_models.ARCHITECTURES["phimoe"]
    model = gguf_models.Model(
        architecture.arch, architecture.shape, gguf_models.MIXED_TYPES, np.random.default_rng(seed)
    )
    model.metadata |= gguf_models._common_metadata(architecture.shape)
    architecture.build(model)
    data, qtype = model.tensors["output.bias"]
    data[:] = [0.0 if i in TOKENS else -1e4 for i in range(len(data))]
    model.tensors["output.bias"] = (data, qtype)
    gguf_models._write(path, model)
    return path


def prompt() -> list[int]:
    """Ends as before, whichever token comes next: so n-grams of 12 tokens find what followed."""
    rng = np.random.default_rng(2)
    begin = [int(token) for token in rng.choice(TOKENS, 11)]
    follows = [[token, *(int(t) for t in rng.choice(TOKENS, 9))] for token in TOKENS]
    return [*(token for tokens in follows for token in (*begin, *tokens)), *begin]


def pairs(path: Path, n_before: int) -> np.ndarray:
    """The chances of two tokens, `n_before` tokens behind `prompt`, by plain decoding: [4, 4]."""
    sampler, chances = Sampler(PLAIN), np.zeros((4, 4))
    with (
        Model(ModelParams(path=path, use_extra_bufts=False)) as model,
        Context(model, ContextParams(n_ctx=256)) as context,
    ):
        start = sampler.probs(context.decode(prompt(), 1)[0])
        n = context.n_past
        for before in product(TOKENS, repeat=n_before):
            for i, one in enumerate(TOKENS):
                chance, probs = 1.0, start
                for token in (*before, one):
                    chance *= probs[token]
                    probs = sampler.probs(context.decode([token], 1)[0])
                chances[i] += chance * probs[TOKENS]
                context.rollback(n)
    return chances


@pytest.mark.parametrize(
    "spec_type",
    [
        "draft", "ngram", "draft-lora", "draft-simple", "ngram-simple", "ngram-map-k",
        "ngram-map-k,draft-simple",
    ],
)  # fmt: skip
def test_two_drafted_tokens_have_plain_decodings_chances(tmp_path: Path, spec_type: str) -> None:
    """The first token is the prompt's; the next two are drafted, and rejected often.

    Masks draft one step later.
    """
    target, draft = write(tmp_path / "target.gguf", 3), write(tmp_path / "draft.gguf", 4)
    has_masks = spec_type == spec_types.DRAFT_LORA
    n_before = 2 if has_masks else 1
    options = RunOptions(
        model=target, draft=draft if spec_types.needs_draft(spec_type) else None, spec_type=spec_type,
        mtp=write_adapter(tmp_path / "mtp.gguf", target) if has_masks else None,
        stock=True, draft_max=3, sampling=PLAIN, n_predict=3 + n_before, n_ctx=256, n_threads=1,
    )  # fmt: skip
    counts, n_drafted, n_accepted = np.zeros((4, 4)), 0, 0
    with Session(options) as session:
        for _ in range(N_TRIALS):
            generation = session.generate(prompt())
            one, other = generation.token_ids[n_before : n_before + 2]
            counts[one - TOKENS[0], other - TOKENS[0]] += 1
            n_drafted += generation.metrics.totals.n_draft
            n_accepted += generation.metrics.totals.n_accepted
    assert n_drafted > N_TRIALS
    assert 50 < n_accepted < n_drafted - 50
    expected = pairs(target, n_before)
    assert expected.sum() == pytest.approx(1.0, abs=1e-4)
    assert chi_square(counts.ravel(), expected.ravel()) < LIMIT
