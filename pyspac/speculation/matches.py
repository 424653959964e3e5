"""How far a repetition goes on: the chance that a draft from a matching place holds, by how long it matches.

In: how many tokens before a draft stood before its source, too (the match), and how many of the draft held.
Out: expected tokens per step for any draft length. A token that holds makes the match longer by itself, so
one curve says both: whether a draft is worth its pass, and how many of its tokens are.
"""

from __future__ import annotations

from typing import Final

# Matches as long as this are alike: a text that has repeated 32 tokens goes on.
N_MATCHED_MAX: Final = 32
# Observations until one counts half: some requests' worth, as the curve is a model's and a kind of text's
# rather than a place's. In replays 30 and 1000 were as good.
HALF_LIFE: Final = 200.0
# Observations that the first guess is worth: in replays 2 to 16 were alike.
N_GUESSED: Final = 8.0
_KEEP: Final = 0.5 ** (1.0 / HALF_LIFE)
# By tokens matched: 1, 2, 3, 4 to 7, 8 to 15, 16 to 31, and more are counted apart.
_BUCKET: Final = [n if n < 4 else 1 + n.bit_length() for n in range(N_MATCHED_MAX + 1)]
# By the same kinds, the shortest match of each: the engine has a draft length for every kind (spac.h).
SHORTEST: Final = {kind: _BUCKET.index(kind) for kind in range(1, 1 + _BUCKET[-1])}


class MatchCurve:
    """Chance that a match of n tokens goes on to n + 1.

    At first 1 - 1 / n, that is: of all matches the n-th part is longer than n tokens. Of the demo model's
    own texts, drawn at temperature 1, matches of 2, 3, 4 to 7, 8 to 15 and more tokens go on with chances of
    0.51, 0.58, 0.75, 0.88 and 0.95; greedy ones with 0.64, 0.82, 0.80, 0.94 and 1.00.
    """

    def __init__(self) -> None:
        """Nothing seen."""
        self._tried = [0.0] * (1 + _BUCKET[-1])
        self._held = [0.0] * (1 + _BUCKET[-1])

    def observe(self, n_matched: int, n_draft: int, n_held: int) -> None:
        """Of a draft of `n_draft` tokens behind a match of `n_matched` the first `n_held` held."""
        for i in range(min(n_draft, n_held + 1)):
            bucket = _BUCKET[min(n_matched + i, N_MATCHED_MAX)]
            self._tried[bucket] = self._tried[bucket] * _KEEP + 1.0
            self._held[bucket] = self._held[bucket] * _KEEP + (i < n_held)

    def goes_on(self, n_matched: int) -> float:
        """The chance that the token after a match of `n_matched` > 0 tokens holds."""
        n = min(n_matched, N_MATCHED_MAX)
        bucket = _BUCKET[n]
        return (self._held[bucket] + N_GUESSED * (1.0 - 1.0 / n)) / (self._tried[bucket] + N_GUESSED)

    def tokens(self, n_matched: int, n_max: int) -> list[float]:
        """[1 + n_max]: expected tokens of a step that drafts 0, 1, ... tokens behind such a match (> 0)."""
        reach, expected = 1.0, [1.0]
        for i in range(n_max):
            reach *= self.goes_on(n_matched + i)
            expected.append(expected[-1] + reach)
        return expected
