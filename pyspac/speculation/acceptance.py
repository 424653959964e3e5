"""Which drafted tokens hold: the acceptance curve, estimated from steps whose drafts end early.

In: (n_asked, n_draft, n_accepted) of steps. Out: expected tokens per step for any draft length, and how sure
that is. Position i is only seen if all before it held, so what is estimated is the
chance that it holds given that; a draft that held to its end says nothing about the positions beyond (they
are censored), and those are thought as good as the last one that was seen. Before anything was seen there is
a guess, even chances, which is worth one observation.

Drafters end drafts on their own: an n-gram drafter finds nothing, a model is not sure of the next token. So
there is a second curve, the chance that a draft of i tokens goes on to i + 1 where more are asked for.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

# steps until an observation counts half. Phases of a text (a list, a quotation) are a few dozen steps long,
# and evidence should not outlast one.
HALF_LIFE: Final = 10.0
GUESS: Final = 0.5  # the chance that a token holds, before anything was seen


class TokenForecast(NamedTuple):
    """For drafts of 0, 1, 2, ... tokens, as many as are asked for; each [1 + n_max]."""

    tokens: list[float]  # emitted by a step
    chances: list[float]  # that the drafter drafts so many, or more
    doubt: float  # standard deviation of tokens - 1, as a share of it


class AcceptanceCurve:
    """Per-position conditional acceptance, positions 1 .. n_max."""

    def __init__(self, n_max: int, n_tried: float = 0.0, n_held: float = 0.0) -> None:
        """What is thought of position 1 at first: n_held of n_tried drafts held there, and GUESS of one."""
        self.keep = 0.5 ** (1.0 / HALF_LIFE)
        self._now = 1.0  # what an observation of this step counts; those before keep theirs
        self._tried = [0.0] * n_max  # in such counts, [n_max]
        self._held = [0.0] * n_max
        self._goes_on = [1.0] * n_max  # chance that a draft of i tokens has one more
        if n_max:
            self._tried[0], self._held[0] = n_tried, n_held

    def observe(self, n_asked: int, n_draft: int, n_accepted: int) -> None:
        """A step: of n_asked tokens n_draft were drafted and the first n_accepted held."""
        self._now /= self.keep
        if self._now > 1e30:
            self._restart()
        tried, held, goes_on = self._tried, self._held, self._goes_on
        n_max = len(tried)
        for i in range(min(n_draft, n_accepted + 1, n_max)):
            tried[i] += self._now
        for i in range(min(n_accepted, n_max)):
            held[i] += self._now
        for i in range(min(n_asked, n_draft + 1, n_max)):
            goes_on[i] += (1.0 - self.keep) * ((n_draft > i) - goes_on[i])

    def _restart(self) -> None:
        """Count from 1 again, before numbers become too large."""
        self._tried = [n / self._now for n in self._tried]
        self._held = [n / self._now for n in self._held]
        self._now = 1.0

    def forecast(self) -> TokenForecast:
        """Expected tokens. The doubt is that of position 1, through which all drafts go."""
        now, expected, reach, chance, rate = self._now, 1.0, 1.0, 1.0, GUESS
        tokens, chances = [1.0], [1.0]
        for tried, held, goes_on in zip(self._tried, self._held, self._goes_on, strict=True):
            rate = (held + rate * now) / (tried + now)
            reach *= rate
            chance *= goes_on
            expected += chance * reach
            tokens.append(expected)
            chances.append(chance)
        return TokenForecast(tokens, chances, self._doubt())

    def _doubt(self) -> float:
        """Of a Beta distribution."""
        if not self._tried:
            return 0.0
        n = self._tried[0] / self._now + 1.0
        rate = (self._held[0] / self._now + GUESS) / n
        return math.sqrt((1.0 - rate) / (rate * (n + 1.0)))
