"""A replayed continuation: drafts that are right as often as they are told to be, and steps through it.

A model of random weights has no draft model that fits it, and the gain of speculation depends on how many
drafts are accepted. So the continuation is computed beforehand, by plain greedy decoding, and replayed: at
each position the true token is drafted with probability p, else another one. Widths of batches, verification
and routing are then real; how often drafts are right is chosen, and the same in all contenders.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from pyspac.engine.step import StepRecord
from pyspac.forward.context import Context

WRONG_DISTANCE = (
    3  # a wrong draft is the token so many positions later: as alike to its neighbours as drafts are
)


class ReplayDrafts:
    """Drafts from `sequence` (prompt and continuation); only the seed decides which positions are right."""

    def __init__(
        self, sequence: Sequence[int], acceptance: float, seed: int, ms_per_token: float = 0.0
    ) -> None:
        """`ms_per_token`: what drafting is made to cost, for each token drafted."""
        self.sequence = list(sequence)
        self.is_right = np.random.default_rng(seed).random(len(self.sequence)) < acceptance
        self.ms_per_token = ms_per_token

    def draft(self, n_known: int, n_max: int) -> list[int]:
        """What follows the first `n_known` tokens."""
        drafted = [self._token(at) for at in range(n_known, min(n_known + n_max, len(self.sequence)))]
        if self.ms_per_token:
            time.sleep(self.ms_per_token * len(drafted) / 1e3)
        return drafted

    def _token(self, at: int) -> int:
        right = self.sequence[at]
        if self.is_right[at]:
            return right
        later = self.sequence[min(at + WRONG_DISTANCE, len(self.sequence) - 1)]
        others = (later, self.sequence[at - 1], abs(right - 1))  # the last one always differs
        return next(token for token in others if token != right)


class Replay:
    """Goes through the drafts' text, whatever the logits say, and counts where the greedy choice is another.

    Kernels round differently for another width or device, so each contender would soon have a text of its
    own, which no draft fits any more; so all decode the same text, in the same steps.
    """

    def __init__(self, context: Context, drafts: ReplayDrafts) -> None:
        self.context, self.drafts = context, drafts
        self.n_known = 0  # of the text; all but the last are in the context
        self.n_taken = self.n_other = 0
        self._n_steps = 0

    @property
    def agreement(self) -> float:
        """Share of the tokens that the contender would have chosen itself."""
        return 1 - self.n_other / max(1, self.n_taken)

    def read(self, n_prompt: int) -> None:
        """The prompt; its logits give the first token."""
        self.n_known = n_prompt
        self._take(self.context.decode(self.drafts.sequence[:n_prompt])[:1].argmax(1))

    def step(self, n_max: int) -> StepRecord:
        """Draft at most so many tokens, verify them, take the wrong ones back."""
        text, t0 = self.drafts.sequence, time.perf_counter_ns()
        drafted = self.drafts.draft(self.n_known, n_max)
        t1 = time.perf_counter_ns()
        tokens, n_past = [text[self.n_known - 1], *drafted], self.context.n_past
        logits = self.context.decode(tokens, len(tokens))
        t2 = time.perf_counter_ns()
        right = text[self.n_known : self.n_known + len(drafted)]
        n_accepted = next((i for i, token in enumerate(drafted) if token != right[i]), len(drafted))
        self._take(logits[: 1 + n_accepted].argmax(1))
        self.context.rollback(n_past + 1 + n_accepted)
        self._n_steps += 1
        return StepRecord(
            step=self._n_steps - 1,
            n_draft=len(drafted),
            n_accepted=n_accepted,
            n_tokens=len(tokens),
            draft_us=(t1 - t0) / 1e3,
            verify_us=(t2 - t1) / 1e3,
        )

    def _take(self, own: Sequence[int]) -> None:
        """The text's next tokens, where the contender would have chosen `own`."""
        taken = self.drafts.sequence[self.n_known : self.n_known + len(own)]
        self.n_other += sum(a != b for a, b in zip(own, taken, strict=True))
        self.n_taken += len(taken)
        self.n_known += len(taken)


def endless(context: Context, prompt: Sequence[int], n_tokens: int) -> list[int]:
    """The prompt and its greedy continuation, without the tokens that would end it."""
    vocab = context.model.vocab
    ends = [token for token in range(vocab.n_tokens) if vocab.is_eog(token)]
    sequence = new = list(prompt)
    for _ in range(n_tokens):
        logits = context.decode(new)[0].copy()
        logits[ends] = -np.inf
        new = [int(logits.argmax())]
        sequence = sequence + new
    return sequence
