"""Which drafted tokens hold: the acceptance curve, estimated from steps whose drafts end early.

In: (n_asked, n_draft, n_accepted) of steps, or of shadow drafts. Out: expected tokens per step for any draft
length, and how sure that is. Position i is only seen if all before it held, so what is estimated is the
chance that it holds given that; a draft that held to its end says nothing about the positions beyond (they
are censored), and those are thought as good as the last one that was seen.

Drafters end drafts on their own: an n-gram drafter finds nothing, a model is not sure of the next token. So
there is a second curve, the chance that a draft of i tokens goes on to i + 1 where more are asked for.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

# steps until an observation counts half. Phases of a text (a list, a quotation) are a few dozen steps long,
# and evidence should not outlast one.
HALF_LIFE: Final = 10.0
# chance that a drafted token holds, before anything was seen: high enough to be tried, and worth only one
# observation.
ACCEPTANCE_PRIOR: Final = 0.6


class TokenForecast(NamedTuple):
    """For drafts of 0, 1, 2, ... tokens, as many as are asked for; each [1 + n_max]."""

    tokens: list[float]  # emitted by a step
    chances: list[float]  # that the drafter drafts so many, or more
    doubt: float  # standard deviation of tokens - 1, as a share of it


class AcceptanceCurve:
    """Per-position conditional acceptance, positions 1 .. n_max."""

    def __init__(self, n_max: int, n_tried: float = 0.0, n_held: float = 0.0) -> None:
        """What is thought of position 1 at first: n_held of n_tried drafts held there."""
        self.keep = 0.5 ** (1.0 / HALF_LIFE)
        self._tried = [0.0] * n_max  # decayed counts, [n_max]
        self._held = [0.0] * n_max
        self._goes_on = [1.0] * n_max  # chance that a draft of i tokens has one more
        if n_max:
            self._tried[0], self._held[0] = n_tried, n_held

    def observe(self, n_asked: int, n_draft: int, n_accepted: int) -> None:
        """A step: of n_asked tokens n_draft were drafted and the first n_accepted held; 0, 0, 0: no look."""
        keep = self.keep
        tried = self._tried = [n * keep for n in self._tried]
        held = self._held = [n * keep for n in self._held]
        n_max = len(tried)
        for i in range(min(n_draft, n_accepted + 1, n_max)):
            tried[i] += 1.0
        for i in range(min(n_accepted, n_max)):
            held[i] += 1.0
        for i in range(min(n_asked, n_draft + 1, n_max)):
            self._goes_on[i] += (1.0 - keep) * ((n_draft > i) - self._goes_on[i])

    def forecast(self) -> TokenForecast:
        """Expected tokens. The doubt is that of position 1, through which all drafts go."""
        tokens, chances, reach, chance, rate = [1.0], [1.0], 1.0, 1.0, ACCEPTANCE_PRIOR
        for tried, held, goes_on in zip(self._tried, self._held, self._goes_on, strict=True):
            rate = (held + rate) / (tried + 1.0)
            reach *= rate
            chance *= goes_on
            tokens.append(tokens[-1] + chance * reach)
            chances.append(chance)
        return TokenForecast(tokens, chances, self._doubt())

    def _doubt(self) -> float:
        """Of a Beta distribution."""
        if not self._tried:
            return 0.0
        n = self._tried[0] + 1.0
        rate = (self._held[0] + ACCEPTANCE_PRIOR) / n
        return math.sqrt((1.0 - rate) / (rate * (n + 1.0)))
