"""Which drafted tokens hold: the acceptance curve, estimated from steps whose drafts end early.

In: (n_draft, n_accepted) of steps, or of shadow drafts. Out: expected tokens per step for any draft length.
Position i is only seen if all before it held, so what is estimated is the chance that it holds given that;
a draft that held to its end says nothing about the positions beyond (they are censored).

Drafters end drafts on their own: an n-gram drafter finds nothing, a model is not sure of the next token. So
there is a second curve, the chance that a draft of i tokens goes on to i + 1 where more are asked for.
"""

from __future__ import annotations

from typing import Final

HALF_LIFE: Final = 10.0  # observations until a sample counts half; phases of a text are short
PRIOR_WEIGHT: Final = 2.0  # samples that the position before (or the long run) counts for
ACCEPTANCE_PRIOR: Final = 0.6  # of the first position, before anything was seen
LENGTH_GAIN: Final = 0.06
SCALE_MAX: Final = 1e9


class AcceptanceCurve:
    """Per-position conditional acceptance, positions 1 .. n_max."""

    def __init__(self, n_max: int, prior: float | None = None, half_life: float = HALF_LIFE) -> None:
        """`prior`: what earlier requests saw at position 1."""
        self.prior = ACCEPTANCE_PRIOR if prior is None else prior
        self.keep = 0.5 ** (1.0 / half_life)
        self._tried = [0.0] * n_max  # decayed counts times _scale, [n_max]
        self._held = [0.0] * n_max
        self._scale = 1.0  # grows instead of all counts shrinking
        self._goes_on = [1.0] * n_max  # chance that a draft of i tokens has one more

    def observe(self, n_draft: int, n_accepted: int) -> None:
        """A draft of n_draft >= 1 tokens of which the first n_accepted hold."""
        self._scale /= self.keep
        for i in range(min(n_draft, n_accepted + 1, len(self._tried))):
            self._tried[i] += self._scale
            if i < n_accepted:
                self._held[i] += self._scale
        if self._scale > SCALE_MAX:
            self._shrink(1.0 / self._scale)
            self._scale = 1.0

    def observe_length(self, n_asked: int, n_draft: int) -> None:
        """The drafter was asked for n_asked tokens and drafted n_draft."""
        for i in range(min(n_asked, n_draft + 1, len(self._goes_on))):
            self._goes_on[i] += LENGTH_GAIN * ((n_draft > i) - self._goes_on[i])

    def forget(self, n_steps: int = 1, long_run: float | None = None) -> None:
        """Steps went by without a look: what is known counts less.

        The best guess then is the `long_run`'s first position, or what was known if there is none.
        """
        factor = self.keep**n_steps
        if self._tried:
            self.prior += (1.0 - factor) * ((self.rates()[0] if long_run is None else long_run) - self.prior)
        self._shrink(factor)

    def _shrink(self, factor: float) -> None:
        self._tried = [factor * n for n in self._tried]
        self._held = [factor * n for n in self._held]

    def weight(self) -> float:
        """Samples that the first position's estimate rests on."""
        return self._tried[0] / self._scale if self._tried else 0.0

    def rates(self) -> list[float]:
        """[n_max] chance that position i holds given all before it do; thin ones lean on the one before."""
        rates = []
        before, prior_weight = self.prior, PRIOR_WEIGHT * self._scale
        for tried, held in zip(self._tried, self._held, strict=True):
            before = (held + prior_weight * before) / (tried + prior_weight)
            rates.append(before)
        return rates

    def chances(self) -> list[float]:
        """[1 + n_max] chance that a draft has 0, 1, 2, ... tokens or more, where as many are asked for."""
        chances = [1.0]
        for goes_on in self._goes_on:
            chances.append(chances[-1] * goes_on)
        return chances

    def expected_tokens(self, chances: list[float]) -> list[float]:
        """[1 + n_max] tokens emitted by a step that asks for 0, 1, 2, ... drafts; `chances` as above."""
        tokens, reach = [1.0], 1.0
        for rate, chance in zip(self.rates(), chances[1:], strict=True):
            reach *= rate
            tokens.append(tokens[-1] + chance * reach)
        return tokens
