"""A replayed continuation: a drafter that is right as often as it is told to be, and a sampler that follows.

A model of random weights has no draft model that fits it, and the gain of speculation depends on how many
drafts are accepted. So the continuation is computed beforehand, by plain greedy decoding, and replayed: at
each position the true token is drafted with probability p, else another one. Widths of batches, verification
and routing are then real; how often drafts are right is chosen, and the same in all contenders.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pyspac.generate.drafting import Drafter, DraftResult
from pyspac.generate.sampling import Probs, Sampler, SamplingParams, argmax
from pyspac.generate.vocab import Vocab

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
        others = (later, self.sequence[at - 1], abs(right - 1))  # the last one always differs
        return next(token for token in others if token != right)


class EndlessSampler(Sampler):
    """Greedy, but for the tokens that would end the text: the reference must be as long as the visits."""

    def __init__(self, vocab: Vocab) -> None:
        super().__init__(SamplingParams())
        self.ends = [token for token in range(vocab.n_tokens) if vocab.is_eog(token)]

    def sample(self, logits: npt.NDArray[np.float32]) -> tuple[int, Probs | None]:
        logits = logits.copy()
        logits[self.ends] = -np.inf
        return argmax(logits), None


class ReplaySampler(Sampler):
    """Takes the reference's tokens, whatever the logits say, and counts where the greedy choice is another.

    Kernels round differently for another width or device, so each contender would soon have a text of its
    own, which no draft fits any more; so all decode the same text, in the same steps.
    """

    def __init__(self, continuation: Sequence[int]) -> None:
        super().__init__(SamplingParams())
        self.continuation = continuation
        self.n_taken = 0
        self.n_other = 0

    @property
    def agreement(self) -> float:
        """Share of the tokens that the contender would have chosen itself."""
        return 1 - self.n_other / max(1, self.n_taken)

    def sample(self, logits: npt.NDArray[np.float32]) -> tuple[int, Probs | None]:
        token = self.continuation[self.n_taken]
        self.n_taken += 1
        self.n_other += argmax(logits) != token
        return token, None

    def _verify_one(self, logits: npt.NDArray[np.float32], token: int, q: Probs | None) -> int:
        return self.sample(logits)[0]
