"""What a predictor is, and how it is judged: by what its tokens then used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from pyspac.engine.ahead import share

Tokens = NDArray[np.int32]  # [n] ids of the vocabulary; -1: not known
Routed = NDArray[np.uint16]  # [n, n_layer, n_expert_used] experts of these tokens; NOT_SEEN where none
Expected = NDArray[np.float32]  # [n_layer, n_expert] activations

NOT_SEEN: Final = 0xFFFF  # the layer did not run for this token, is not split, or has fewer experts


@dataclass(slots=True)
class Score:
    """How right a predictor was, over the tokens that it learned from: before each, it was asked.

    Counts of activations: (token, layer, expert).
    """

    n_tokens: int = 0
    n_known: int = 0  # tokens for which anything was predicted
    n_predicted: int = 0
    n_used: int = 0  # by the tokens that were known
    n_right: int = 0  # predicted and used

    @property
    def recall(self) -> float | None:
        """Share of what known tokens used that was predicted; None: no such token."""
        return share(self.n_right, self.n_used)

    @property
    def precision(self) -> float | None:
        """Share of what was predicted that was used; None: nothing was predicted."""
        return share(self.n_right, self.n_predicted)

    @property
    def known(self) -> float | None:
        """Share of the tokens for which anything was predicted; None: no token."""
        return share(self.n_known, self.n_tokens)


class Predictor(Protocol):
    """One way of predicting, with what it has learned."""

    name: str
    score: Score

    def learn(self, tokens: Tokens, experts: Routed) -> None:
        """Take in what these tokens used, in their order; an id below 0 teaches nothing."""

    def predict(self, tokens: Tokens) -> Expected:
        """Return the activations to expect of these tokens together; 0 where nothing is known."""

    @property
    def n_bytes(self) -> int:
        """Return the memory that it takes at most."""

    def state(self) -> dict[str, NDArray[Any]]:
        """Return what was learned, by name, for a later `restore`."""

    def restore(self, state: dict[str, NDArray[Any]]) -> bool:
        """Go on from another's `state()`; False, with nothing changed, if it does not fit."""

    def merged(self, state: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Return `state()` with what another's knows beyond it; without, where that does not fit."""
