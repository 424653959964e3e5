"""Replayed drafts: a drafter that knows the continuation, and is right as often as it is told to be.

A model of random weights has no draft model that fits it, and the gain of speculation depends on how many
drafts are accepted. So the continuation is computed beforehand, by plain greedy decoding, and replayed: at
each position the true token with probability p, else another one. Widths of batches, verification and routing
are then real; how often drafts are right is chosen, and the same in all contenders.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from pyspac.drafting import Drafter, DraftResult

WRONG_DISTANCE = (
    3  # a wrong draft is the token so many positions later: as alike to its neighbours as drafts are
)


class ReplayDrafter(Drafter):
    """Drafts from `sequence` (prompt and continuation); the seed alone decides which positions are right."""

    def __init__(
        self, sequence: Sequence[int], acceptance: float, seed: int, ms_per_token: float = 0.0
    ) -> None:
        """`ms_per_token`: what drafting is made to cost, for each token drafted."""
        self.sequence = list(sequence)
        self.is_right = np.random.default_rng(seed).random(len(self.sequence)) < acceptance
        self.ms_per_token = ms_per_token

    def draft(self, tokens: Sequence[int], n_max: int) -> DraftResult:
        first = len(tokens)
        drafted = [self._token(at) for at in range(first, min(first + n_max, len(self.sequence)))]
        if self.ms_per_token:
            time.sleep(self.ms_per_token * len(drafted) / 1e3)
        return DraftResult(drafted)

    def _token(self, at: int) -> int:
        right = self.sequence[at]
        if self.is_right[at]:
            return right
        later = self.sequence[min(at + WRONG_DISTANCE, len(self.sequence) - 1)]
        return later if later != right else self.sequence[max(0, at - 1)]


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first position at which two token sequences differ; None: one begins with the other."""
    for at, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return at
    return None
