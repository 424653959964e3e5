"""Drafters: who proposes the next tokens, which the target then verifies in one batch.

One interface. In: the whole sequence so far (prompt and everything emitted) and how many tokens at most. Out:
a `DraftResult`. After verification `accept(n)` says how many of the drafts hold.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pyspac.generate.sampling import Probs, Sampler

if TYPE_CHECKING:
    from pyspac.generate.llama import Context


@dataclass(frozen=True, slots=True)
class DraftResult:
    """Drafted tokens; `probs`: the distribution [n_vocab] of each, None if the drafter is deterministic.

    `n_masks`: tokens that the pass which verifies them has besides, to draft the next ones.
    `n_matched`: how many of the last tokens stood together before, where that was looked for; else 0. Of a
    copied draft: those before its source.
    """

    tokens: list[int] = field(default_factory=list)
    probs: list[Probs] | None = None
    n_masks: int = 0
    n_matched: int = 0


class Drafter(ABC):
    """The interface."""

    def prepare(self, tokens: Sequence[int]) -> None:  # noqa: B027  nothing to do for most
        """Process the prompt, so that the first draft need not."""

    @abstractmethod
    def draft(self, tokens: Sequence[int], n_max: int) -> DraftResult:
        """At most `n_max` tokens to follow `tokens`; none is allowed."""

    def verify(self, context: Context, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Have the target compute its last token and the drafts: logits [n_tokens, n_vocab]."""
        return context.decode(tokens, len(tokens))

    def read(self, tokens: Sequence[int], n_past: int) -> None:  # noqa: B027
        """The target has just computed these tokens of a prompt, which stand at `n_past`."""

    def keep(self, n: int) -> int:
        """The next sequence begins as the one before, for `n` tokens; how many need not be read again."""
        return n

    def accept(self, n: int) -> None:  # noqa: B027
        """The first `n` tokens of the last draft were accepted."""


class DrafterAround(Drafter):
    """Hands everything on to another drafter; a subclass changes a part."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner

    def prepare(self, tokens: Sequence[int]) -> None:
        self.inner.prepare(tokens)

    def draft(self, tokens: Sequence[int], n_max: int) -> DraftResult:
        return self.inner.draft(tokens, n_max)

    def verify(self, context: Context, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        return self.inner.verify(context, tokens)

    def read(self, tokens: Sequence[int], n_past: int) -> None:
        self.inner.read(tokens, n_past)

    def keep(self, n: int) -> int:
        return self.inner.keep(n)

    def accept(self, n: int) -> None:
        self.inner.accept(n)


class NoDrafter(Drafter):
    """Plain decoding."""

    def draft(self, tokens: Sequence[int], n_max: int) -> DraftResult:
        return DraftResult()


class FreeDrafter(Drafter):
    """Looks at the text alone, so it can say later what it would have drafted (see shadow.py)."""

    def draft(self, tokens: Sequence[int], n_max: int) -> DraftResult:
        return DraftResult(self.draft_at(tokens, len(tokens), n_max))

    @abstractmethod
    def draft_at(self, tokens: Sequence[int], end: int, n_max: int) -> list[int]:
        """What is drafted where the sequence is `tokens[:end]`; `end` only grows."""


class ModelDrafter(Drafter):
    """A small model with the target's vocabulary, in a context of its own.

    Its cache always holds a prefix of the target's sequence, plus, between `draft` and `accept`, the drafts.
    llama.cpp's draft-simple reads every token once more after it was verified, also while nothing is drafted,
    and drafts the likeliest token only, without a distribution: here neither accepted drafts nor plain steps
    cost a second pass, and sampled drafts are accepted more often.
    """

    def __init__(self, context: Context, sampler: Sampler, p_min: float = 0.0) -> None:
        """`sampler`: the target's parameters, so that drafts resemble what it draws; a stream of its own.

        A draft ends where the likeliest next token has a probability below `p_min`.
        """
        self.context = context
        self.sampler = sampler
        self.p_min = p_min
        self._n_known = 0  # tokens of the sequence at the last draft

    def keep(self, n: int) -> int:
        """See Drafter."""
        self._truncate(n)
        return n

    def prepare(self, tokens: Sequence[int]) -> None:
        self._truncate(len(tokens))
        self.context.decode(tokens[self.context.n_past :], 0)
        self._n_known = len(tokens)

    def draft(self, tokens: Sequence[int], n_max: int) -> DraftResult:
        n_max = min(n_max, self.context.n_ctx - len(tokens))
        if n_max <= 0:
            return DraftResult()
        self._truncate(min(self._n_known, len(tokens) - 1))
        self._n_known = len(tokens)
        return self._draft_after(tokens[self.context.n_past :], n_max)

    def _draft_after(self, pending: Sequence[int], n_max: int) -> DraftResult:
        drafted: list[int] = []
        probs: list[Probs] = []
        while len(drafted) < n_max:
            logits = self.context.decode(pending, 1)[0]
            token, p = self.sampler.sample(logits)
            if self.p_min > 0.0 and _top_probability(logits, p) < self.p_min:
                break  # for this the token drawn must not matter, or the output's distribution changes
            drafted.append(token)
            if p is not None:
                probs.append(p)
            if self.context.model.vocab.is_eog(token):
                break  # nothing follows the end
            pending = [token]
        return DraftResult(drafted, probs or None)

    def accept(self, n: int) -> None:
        self._n_known += n
        self._truncate(self._n_known)

    def _truncate(self, n: int) -> None:
        self.context.rollback(min(n, self.context.n_past))


def _top_probability(logits: npt.NDArray[np.float32], probs: Probs | None) -> float:
    """Of the likeliest token, in `probs`, or before sampling where there are none (greedy)."""
    if probs is not None:
        return float(probs.max())
    return 1.0 / float(np.exp(logits - logits.max()).sum())
