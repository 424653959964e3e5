"""`forecast` for a drafter that finds its drafts in the text: each is judged by what was found.

Such a draft costs nothing, and how long its source matches the text says most of how far it holds
(`matches.py`). So the drafter looks first, and the length is chosen for what it found: none behind a match of
two tokens, all behind one of thirty. Times, the ledger and the rule are `forecast.py`'s.
"""

from __future__ import annotations

import math

from pyspac.engine.step import StepRecord
from pyspac.speculation.controller import Shared
from pyspac.speculation.cost_table import FAR, Estimate
from pyspac.speculation.forecast import Choice, Forecast, Option
from pyspac.speculation.matches import N_MATCHED_MAX, MatchCurve


class MatchForecast(Forecast):
    """One request's choices. `next_n_draft` is how far to look, `n_draft_for` what to draft of it."""

    def __init__(self, shared: Shared) -> None:
        """See Forecast."""
        self.matches = shared.memory(MatchCurve)
        self._chosen: dict[tuple[int, int], Choice] = {}  # by match and the last step's length
        self._n_last = 0  # drafted by the last step
        super().__init__(shared)

    def n_draft_for(self, n_matched: int) -> int:
        """Of a draft whose source matches the text's last `n_matched` > 0 tokens; 0: none of it."""
        key = (min(n_matched, N_MATCHED_MAX), self._n_last)
        if key not in self._chosen:
            self._chosen[key] = self._choice_for(*key)
        choice = self._chosen[key]
        self._say(choice)
        return choice.n_draft

    def observe_passed_over(self, n_matched: int, is_held: bool) -> None:
        """The text has come to the first token of a draft that was not made."""
        self.matches.observe(n_matched, 1, int(is_held))

    def observe(self, record: StepRecord) -> None:
        """See Controller."""
        self._n_last = record.n_draft
        super().observe(record)

    def _learn_drafts(self, record: StepRecord) -> None:
        """See Forecast."""
        if record.n_draft:
            self.matches.observe(record.n_matched, record.n_draft, record.n_accepted)

    def _is_sure(self) -> bool:
        """See Forecast."""
        return self._phase != "baseline" and all(c.phase != "probe" for c in self._chosen.values())

    def _choose_with(self, plain: Estimate) -> None:
        """See Forecast. The drafter looks as far as it may, and asks what its find is worth."""
        self._chosen.clear()
        self._phase, self._n_draft = "choose", self.n_draft_max

    def _choice_for(self, n_matched: int, n_last: int) -> Choice:
        """The length behind such a match. O(n_draft_max), some 20 us."""
        plain = self.shared.table.step(0, self._n_others)
        assert plain is not None, "the drafter looks for nothing before a plain step was timed"
        choice = self._pick(self._judge_match(plain, n_matched, n_last))
        return choice._replace(why=f"{choice.why}, behind a match of {n_matched} tokens")

    def _judge_match(self, plain: Estimate, n_matched: int, n_last: int) -> list[Option]:
        """All lengths, the plain step first. Costs are in plain steps."""
        table, n_others = self.shared.table, self._n_others
        tokens = self.matches.tokens(n_matched, self.n_draft_max)
        appetite = self.memory.ledger.appetite()
        change = 0.0 if n_others else table.change_us() / plain.us
        cost = 1.0 + change * (n_last > 0) * (2.0 - tokens[1])
        options = [Option(0, 1.0 / cost, appetite * math.sqrt(plain.variance) - math.log(cost), 0.0)]
        price = 1.0
        for k in self.lengths:
            step = table.step(k, n_others) or plain
            price = max(price, step.us / plain.us)  # no step is shorter than one with fewer tokens
            ends = 1.0 - (tokens[k] - tokens[k - 1])  # not all hold: the next step has another width again
            cost = price + change * ends * (1.0 + (k != n_last))
            gained = self._gained(tokens[k])
            score = math.log(gained / cost) + appetite * math.sqrt(step.variance)
            loss = cost * math.exp(FAR * math.sqrt(step.variance)) - gained
            options.append(Option(k, gained / cost, score, loss))
        return options
