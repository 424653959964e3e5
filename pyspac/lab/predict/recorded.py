"""Recorded guesses: routers that were asked early while the trace was made."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from pyspac.lab.demand import Bools, Floats, Indices, Keys, Tokens
from pyspac.lab.trace import softmax

RECORDED: Final = "recorded"


class RecordedPredictor:
    """Real guesses, scores and all."""

    source = RECORDED
    has_scores = True

    def __init__(self, logits: npt.NDArray[np.float16]) -> None:
        """Take a trace's [n_token, n_layer, n_expert] logits; a token without a guess has no finite ones."""
        self.logits = logits
        self.n_expert = logits.shape[2]

    def has_guess(self, il: int, tokens: Tokens) -> Bools:
        """Return [n] which tokens have one."""
        return np.asarray(np.isfinite(self.logits[tokens, il]).all(axis=1))

    def top(self, il: int, tokens: Tokens, n: int) -> Keys:
        """Return the union of the n best experts per token that has a guess, the best first."""
        tokens = tokens[self.has_guess(il, tokens)]
        if not len(tokens):
            return np.zeros(0, np.intp)
        probs = self.scores(il, tokens)
        best = np.argsort(-probs, axis=1, kind="stable")[:, : max(n, 1)]
        return np.asarray(il * self.n_expert + best_first(probs, np.unique(best)))

    def scores(self, il: int, tokens: Tokens) -> Floats:
        """Return [n_guess, n_expert] for the tokens that have a guess; one row of 0 if none has."""
        z = self.logits[tokens, il]
        z = z[np.isfinite(z).all(axis=1)]
        return softmax(z) if len(z) else np.zeros((1, self.n_expert))


def best_first(probs: Floats, experts: Indices) -> Indices:
    """Order experts by the highest probability that any token gives them."""
    return np.asarray(experts[np.argsort(-probs[:, experts].max(axis=0), kind="stable")])
