"""A stand-in for llama.Context: a language model that is a hash function, with a visible cache."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np

EOG = 0


class FakeVocab:
    """Token 0 ends the generation."""

    def __init__(self, n_tokens: int) -> None:
        self.n_tokens = n_tokens

    def is_eog(self, token: int) -> bool:
        return token == EOG


class FakeContext:
    """Logits depend on the last `n_order` tokens and on `seed`; `cache` holds the tokens decoded so far."""

    def __init__(
        self, *, n_vocab: int = 7, n_ctx: int = 64, n_outputs_max: int = 9, n_order: int = 2, seed: int = 0
    ):
        self.n_ctx = n_ctx
        self.params = SimpleNamespace(n_ubatch=8, n_outputs_max=n_outputs_max)
        self.model = SimpleNamespace(vocab=FakeVocab(n_vocab))
        self.n_order = n_order
        self.seed = seed
        self.cache: list[int] = []
        self.widths: list[int] = []  # tokens of each decode

    @property
    def n_past(self) -> int:
        return len(self.cache)

    def logits_after(self, tokens: Sequence[int]) -> np.ndarray:
        """[n_vocab] float32"""
        rng = np.random.default_rng([self.seed, *tokens[-self.n_order :]])
        return 2 * rng.standard_normal(self.model.vocab.n_tokens, dtype=np.float32)

    def decode(self, tokens: Sequence[int], n_outputs: int = 1) -> np.ndarray:
        assert tokens, "an empty batch"
        assert n_outputs <= self.params.n_outputs_max
        assert len(self.cache) + len(tokens) <= self.n_ctx, "decoded past the context"
        self.widths.append(len(tokens))
        rows = []
        for token in tokens:
            self.cache.append(int(token))
            rows.append(self.logits_after(self.cache))
        return np.array(rows[len(rows) - n_outputs :])

    def rollback(self, n_past: int) -> None:
        assert n_past <= len(self.cache)
        del self.cache[n_past:]
