"""What a predictor is, and which one stands in for a router that a trace may or may not have recorded."""

from __future__ import annotations

from typing import Literal, Protocol

from pyspac.lab.demand import Floats, Keys, Tokens

Source = Literal["next-layer", "draft-gate"]  # the next layer's router, applied early; the draft model's


class Predictor(Protocol):
    """Guesses for tokens of one step, layer by layer."""

    @property
    def source(self) -> str:
        """Say where guesses come from, for reports: "recorded", or "assumed 0.85"."""

    @property
    def has_scores(self) -> bool:
        """Whether it can say how sure it is. Scores are not made up: what needs them needs a record."""

    def top(self, il: int, tokens: Tokens, n: int) -> Keys:
        """Return the union of n experts per token, the most certain first."""

    def scores(self, il: int, tokens: Tokens) -> Floats:
        """Return [n_token, n_expert] the probability that each token picks each expert; needs has_scores."""
