"""Prompt lookup: the last tokens stood somewhere before, and what followed there is the draft.

In: the sequence so far. Out: a draft, and how many tokens before it match those before its source, which says
how far it will hold (pyspac/speculation/matches.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspac.generate.drafting import Drafter, DraftResult
from pyspac.speculation.matches import N_MATCHED_MAX


class NgramDrafter(Drafter):
    """Copies from one of two sources, the one with the longer match.

    One follows the latest occurrence of the last n tokens, with the largest n of `n_match_max` down to
    `n_match_min` that occurs. The other is where the last draft was copied from, as many tokens further as
    the text has grown. The index grows with the sequence: O(1) per token and length. llama.cpp's n-gram
    drafters match one length only, 12 tokens and more, so that they are silent in most texts. No FreeDrafter:
    what it drafts depends on what it drafted before.
    """

    def __init__(self, n_match_max: int = 4, n_match_min: int = 2) -> None:
        self.lengths = range(n_match_max, n_match_min - 1, -1)
        self._follower: dict[tuple[int, ...], int] = {}  # n-gram -> position after its latest occurrence
        self._n_indexed = 0
        self._distance = 0  # from the end of the text back to the last source; 0: there was none

    def draft(self, tokens: Sequence[int], n_max: int) -> DraftResult:
        """See Drafter."""
        if n_max <= 0 or not (n_matched := self.match(tokens)):
            return DraftResult()
        return DraftResult(self.copy(tokens, n_max), n_matched=n_matched)

    def copy(self, tokens: Sequence[int], n: int) -> list[int]:
        """The `n` tokens behind the source that the last `match` found; it has to have found one.

        Where they come to the end of the text, the draft's own tokens are copied.
        """
        start = len(tokens) - self._distance
        drafted = list(tokens[start : start + n])
        while len(drafted) < n:
            drafted += drafted[: n - len(drafted)]
        return drafted

    def match(self, tokens: Sequence[int]) -> int:
        """How many of the last tokens stand before the source, N_MATCHED_MAX at most; 0: there is none."""
        self._index(tokens)
        n_matched, self._distance = self._longest(tokens)
        return n_matched

    def keep(self, n: int) -> int:
        """See Drafter."""
        if n < self._n_indexed:  # later occurrences may have taken the place of earlier ones
            self._follower.clear()
            self._n_indexed = 0
        return n

    def _longest(self, tokens: Sequence[int]) -> tuple[int, int]:
        """(tokens that match, distance back to the source); (0, 0): no n-gram has occurred before."""
        end = len(tokens)
        for n in self.lengths:
            start = self._follower.get(tuple(tokens[end - n :])) if end > n else None
            if start is not None:
                latest = (_n_matched(tokens, start), end - start)
                return max(
                    latest, (self._n_still_matched(tokens), self._distance), key=lambda found: found[0]
                )
        return 0, 0

    def _n_still_matched(self, tokens: Sequence[int]) -> int:
        """Tokens that match before the last source, which is as far from the end as it was then."""
        return _n_matched(tokens, len(tokens) - self._distance) if 0 < self._distance < len(tokens) else 0

    def _index(self, tokens: Sequence[int]) -> None:
        """Add all n-grams that have a follower: those ending before the last token."""
        for end in range(max(1, self._n_indexed), len(tokens)):
            for n in self.lengths:
                if end >= n:
                    self._follower[tuple(tokens[end - n : end])] = end
        self._n_indexed = len(tokens)


def _n_matched(tokens: Sequence[int], start: int) -> int:
    """How many tokens before `start` are those before the end; N_MATCHED_MAX at most."""
    # as lists: tokens may be an array, which is equal token by token
    before = tokens[max(0, start - N_MATCHED_MAX) : start]
    if start >= N_MATCHED_MAX and list(before) == list(tokens[-N_MATCHED_MAX:]):
        return N_MATCHED_MAX  # at once; else fewer match
    n = 0
    while n < start and tokens[start - 1 - n] == tokens[-1 - n]:
        n += 1
    return n
