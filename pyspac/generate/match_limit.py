"""Drafts as long as their match is worth: what a drafter found in the text, cut to what the controller says.

Wraps the n-gram drafter. Tells the controller whether what it passed over would have held: the first token of
a draft that was not made is compared with the text once that has come. Under greedy decoding that is what
verification would have said. Under sampling it has the same chance: a deterministic draft x is accepted with
probability p(x), and x is drawn with probability p(x).
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspac.generate.drafting import Drafter, DraftResult
from pyspac.generate.ngram_drafter import NgramDrafter
from pyspac.speculation.match_forecast import MatchForecast


class MatchLimit(Drafter):
    """One generation's drafter around the session's."""

    def __init__(self, inner: NgramDrafter, controller: MatchForecast) -> None:
        self.inner = inner
        self.controller = controller
        self._passed: tuple[int, int, int] | None = None  # position, match, and token of a draft not made

    def prepare(self, tokens: Sequence[int]) -> None:
        self.inner.prepare(tokens)

    def draft(self, tokens: Sequence[int], n_max: int) -> DraftResult:
        """See Drafter."""
        self._tell(tokens)
        found = self.inner.draft(tokens, n_max)
        if not found.tokens:
            return found
        n_draft = self.controller.n_draft_for(found.n_matched)
        if n_draft == 0:
            self._passed = (len(tokens), found.n_matched, found.tokens[0])
        return DraftResult(found.tokens[:n_draft], n_matched=found.n_matched)

    def accept(self, n: int) -> None:
        self.inner.accept(n)

    def _tell(self, tokens: Sequence[int]) -> None:
        """Whether what was passed over holds."""
        if self._passed is not None:
            position, n_matched, token = self._passed
            self.controller.observe_passed_over(n_matched, tokens[position] == token)
            self._passed = None
