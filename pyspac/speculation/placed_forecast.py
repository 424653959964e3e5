"""`forecast` with a draft length for each place in the text, by how far the text repeats itself there.

How many of the last tokens stood together before, the match, tells how predictable the next ones are. A
place is what has one draft length: of drafts that are copied (`MatchForecast`) the length of the match. The
engine has a limit for each kind of match (pyspac/server/board_speculation.py). Times, the ledger and the
rule are those of `forecast.py`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Final

from pyspac.engine.step import StepRecord
from pyspac.speculation.choice import Choice, Option, judged, pick
from pyspac.speculation.controller import Shared
from pyspac.speculation.forecast import ForecastBase
from pyspac.speculation.matches import N_MATCHED_MAX, MatchCurve

NO_LIMIT: Final = 1 << 30


class PlacedForecast(ForecastBase):
    """One request's choices. `next_n_draft` is how far to look, `n_draft_for` what to draft."""

    def __init__(self, shared: Shared) -> None:
        """See ForecastBase."""
        self._chosen: dict[tuple[int, int], Choice] = {}  # by place and the last step's length
        self._n_last = 0  # drafted by the last step
        super().__init__(shared)

    def n_draft_for(self, n_matched: int) -> int:
        """The longest draft where the text's last `n_matched` tokens stood before; 0: none."""
        choice = self._choice(self.place(n_matched))
        self._say(choice)
        return choice.n_draft

    def _choice(self, place: int) -> Choice:
        """Its choice now; made when it is asked for."""
        key = (place, self._n_last)
        choice = self._chosen.get(key)
        if choice is None:
            choice = pick(self._judge_place(*key), self.memory.ledger, self.named(place))
            self._chosen[key] = choice
        return choice

    @abstractmethod
    def place(self, n_matched: int) -> int:
        """The place that such a match stands for."""

    @abstractmethod
    def named(self, place: int) -> str:
        """For `--explain`."""

    @abstractmethod
    def _judge_place(self, place: int, n_last: int) -> list[Option]:
        """All lengths, the plain step first; see ForecastBase._judge."""

    def observe(self, record: StepRecord) -> None:
        """See Controller."""
        self._n_last = record.n_draft
        super().observe(record)

    def _choose_priced(self) -> None:
        """See ForecastBase. The drafter looks as far as it may, and asks what its place is worth."""
        self._chosen.clear()
        self._phase, self._n_draft = "choose", self._limit()

    def _limit(self) -> int:
        """How far it may look."""
        return self.n_draft_max


class MatchForecast(PlacedForecast):
    """Of the n-gram drafter, which copies what followed the match."""

    def __init__(self, shared: Shared) -> None:
        """See ForecastBase."""
        self.matches = shared.memory(MatchCurve)
        super().__init__(shared)

    def place(self, n_matched: int) -> int:
        """See PlacedForecast: the match's length."""
        return min(n_matched, N_MATCHED_MAX)

    def named(self, place: int) -> str:
        """See PlacedForecast."""
        return f"after a match of {place} tokens" + " or more" * (place == N_MATCHED_MAX)

    def observe(self, record: StepRecord) -> None:
        """See Controller. What was passed over is told of at once."""
        if record.n_passed_over:
            self.observe_passed_over(abs(record.n_passed_over), record.n_passed_over > 0)
        super().observe(record)

    def observe_passed_over(self, n_matched: int, is_held: bool) -> None:
        """The text has come to the first token of a draft that was not made."""
        self.matches.observe(n_matched, 1, int(is_held))

    def _learn_drafts(self, record: StepRecord) -> None:
        """See ForecastBase."""
        if record.n_draft:
            self.matches.observe(record.n_matched, record.n_draft, record.n_accepted)

    def _judge_place(self, place: int, n_last: int) -> list[Option]:
        """See PlacedForecast."""
        tokens = self.matches.tokens(place, self.n_draft_max)
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
