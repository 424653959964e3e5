"""Drafts as long as pays at their place in the text: the drafter asks the controller in each step.

The place follows from the match: how many of the last tokens stood together before
(pyspac/speculation/placed_forecast.py). `MatchLimit` has the n-gram drafter copy no more than that, and
`PlaceLimit` a model draft no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pyspac.generate.drafting import Drafter, DrafterAround, DraftResult
from pyspac.generate.ngram_drafter import NgramDrafter
from pyspac.speculation.placed_forecast import N_REPEATED, MatchForecast, ModelForecast


class MatchLimit(DrafterAround):
    """Around the n-gram drafter, for one generation.

    Tells the controller whether what it passed over would have held: the first token of a draft that was not
    made is compared with the text once that has come. That says what verification would have said (see
    shadow.py).
    """

    inner: NgramDrafter

    def __init__(self, inner: NgramDrafter, controller: MatchForecast) -> None:
        super().__init__(inner)
        self.controller = controller
        self._passed: tuple[int, int, int] | None = None  # position, match, and token of a draft not made

    def draft(self, tokens: Sequence[int], n_max: int) -> DraftResult:
        """See Drafter."""
        self._tell(tokens)
        if n_max <= 0 or not (n_matched := self.inner.match(tokens)):
            return DraftResult()
        n_draft = self.controller.n_draft_for(n_matched)
        if n_draft == 0:
            self._passed = (len(tokens), n_matched, self.inner.copy(tokens, 1)[0])
            return DraftResult(n_matched=n_matched)
        return DraftResult(self.inner.copy(tokens, min(n_draft, n_max)), n_matched=n_matched)

    def _tell(self, tokens: Sequence[int]) -> None:
        """Whether what was passed over holds."""
        if self._passed is not None:
            position, n_matched, token = self._passed
            self.controller.observe_passed_over(n_matched, tokens[position] == token)
            self._passed = None


class PlaceLimit(DrafterAround):
    """Around a drafter with a model, for one generation."""

    def __init__(self, inner: Drafter, controller: ModelForecast) -> None:
        super().__init__(inner)
        self.controller = controller
        self.matcher = NgramDrafter(N_REPEATED, N_REPEATED)  # finds matches; its drafts are not asked for

    def prepare(self, tokens: Sequence[int]) -> None:
        """See Drafter."""
        super().prepare(tokens)
        self.matcher.match(tokens)

    def draft(self, tokens: Sequence[int], n_max: int) -> DraftResult:
        """See Drafter."""
        if n_max <= 0:
            return self.inner.draft(tokens, 0)
        n_matched = self.matcher.match(tokens)
        n_draft = self.controller.n_draft_for(n_matched, n_max)
        return replace(self.inner.draft(tokens, n_draft), n_matched=n_matched)
