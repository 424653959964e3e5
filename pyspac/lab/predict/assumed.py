"""Assumed guesses: made from the truth, and wrong as often as one says.

Each of a token's experts is in the guess with the accuracy as its probability, whatever its rank, and random
experts fill the rest; a guess of n * n_expert_used experts finds each with 1 - (1 - accuracy)^n. What rests
on such a guess is reported as `assumed`.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from pyspac.lab.demand import Floats, Keys, Tokens
from pyspac.lab.trace import NOT_RUN, Trace

ASSUMED: Final = "assumed"


class AssumedPredictor:
    """Seeded, so that a run repeats."""

    has_scores = False

    def __init__(self, trace: Trace, accuracy: float, seed: int) -> None:
        """Look the truth up in the trace."""
        self.experts = trace.experts  # [n_token, n_layer, n_expert_used]
        self.n_expert, self.n_expert_used = trace.geometry.n_expert, trace.geometry.n_expert_used
        self.accuracy = accuracy
        self.source = f"{ASSUMED} {accuracy:g}"
        self.rng = np.random.default_rng(seed)

    def top(self, il: int, tokens: Tokens, n: int) -> Keys:
        """Return the union of n experts per token, those that are right first."""
        n = min(max(n, 1), self.n_expert)
        truth = self.experts[tokens, il]
        truth = truth[truth[:, 0] != NOT_RUN][:, :n]
        recall = 1.0 - (1.0 - self.accuracy) ** max(n / self.n_expert_used, 1.0)
        found = truth[self.rng.random(truth.shape) < recall]
        wrong = self.rng.integers(0, self.n_expert, len(truth) * n - len(found))
        both = np.concatenate([found.astype(np.intp), wrong])
        _, first = np.unique(both, return_index=True)
        return np.asarray(il * self.n_expert + both[np.sort(first)], np.intp)

    def scores(self, il: int, tokens: Tokens) -> Floats:
        """There are none."""
        raise NotImplementedError("assumed guesses have no scores")
