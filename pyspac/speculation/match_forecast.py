"""`forecast` for the n-gram drafter: a draft length for each length of match.

How many of the last tokens stood together before, the match, tells how predictable the next ones are. The
engine has a limit for each kind of match (pyspac/server/board_speculation.py). Times, the ledger and the rule
are those of `forecast.py`.
"""

from __future__ import annotations

import math

from pyspac.engine.step import StepRecord
from pyspac.speculation.choice import Choice, Option, judged, pick
from pyspac.speculation.controller import Shared
from pyspac.speculation.forecast import ForecastBase
from pyspac.speculation.matches import N_MATCHED_MAX, MatchCurve


class MatchForecast(ForecastBase):
    """One request's choices. `next_n_draft` is how far to look, `n_draft_for` what to draft."""

    def __init__(self, shared: Shared) -> None:
        """See ForecastBase."""
        super().__init__(shared)
        self.matches = shared.memory(MatchCurve)
        self._chosen: dict[tuple[int, int], Choice] = {}  # by the match's length and the last step's draft
        self._n_last = 0  # drafted by the last step

    def n_draft_for(self, n_matched: int) -> int:
        """The longest draft where the text's last `n_matched` tokens stood before; 0: none."""
        choice = self._choice(min(n_matched, N_MATCHED_MAX))
        self._say(choice)
        return choice.n_draft

    def _choice(self, n_matched: int) -> Choice:
        """Behind such a match; made when it is asked for."""
        key = (n_matched, self._n_last)
        choice = self._chosen.get(key)
        if choice is None:
            name = f"after a match of {n_matched} tokens" + " or more" * (n_matched == N_MATCHED_MAX)
            choice = pick(self._judge_match(*key), self.memory.ledger, name)
            self._chosen[key] = choice
        return choice

    def _choose_priced(self) -> None:
        """See ForecastBase. The drafter looks as far as it may, and asks what its match is worth."""
        self._chosen.clear()
        self._phase, self._n_draft = "choose", self.n_draft_max

    def observe(self, record: StepRecord) -> None:
        """See Controller. What was passed over is told of at once."""
        if record.n_passed_over:
            self.observe_passed_over(abs(record.n_passed_over), record.n_passed_over > 0)
        self._n_last = record.n_draft
        super().observe(record)

    def observe_passed_over(self, n_matched: int, is_held: bool) -> None:
        """The text has come to the first token of a draft that was not made."""
        self.matches.observe(n_matched, 1, int(is_held))

    def _learn_drafts(self, record: StepRecord) -> None:
        """See ForecastBase."""
        if record.n_draft:
            self.matches.observe(record.n_matched, record.n_draft, record.n_accepted)

    def _judge_match(self, n_matched: int, n_last: int) -> list[Option]:
        """All lengths behind such a match, the plain step first; see Forecast._judge."""
        tokens = self.matches.tokens(n_matched, self.n_draft_max)
        appetite, change = self.memory.ledger.appetite(), self._change
        # a plain step after drafts changes widths; in a text that repeats that comes once, when the match
        # ends: it is charged with the chance that it ends here
        cost = 1.0 + change * (n_last > 0) * (2.0 - tokens[1])
        options = [Option(0, 1.0 / cost, appetite * self._plain_doubt - math.log(cost), 0.0)]
        for price in self._prices:
            k = price.n_draft
            ends = 1.0 - (tokens[k] - tokens[k - 1])  # not all hold: the next step changes widths again
            dear = price.cost + change * ends * (1.0 + (k != n_last))
            options.append(judged(price, self._gained(tokens[k]), 0.0, dear, appetite))
        return options
