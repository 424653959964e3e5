"""The loss ledger: how much time may still be lost against the usual way, by trying another one.

In: what each step took and emitted, in usual steps. Out: a balance. It earns a share of all time, gains fill
it, losses drain it, and it never holds more than its capacity: so over any stretch of n steps at most
`capacity + share * n` usual steps are lost, and what the last step overdrew. Where a gain is all but certain
it may be overdrawn, by the capacity once more: then nothing is lost unless the forecast is wrong.

The share is smaller in debt: for who has lost more than CREDIT beyond what was gained lately. Another request
is out of debt until it has lost a step.

Speculation has one against plain decoding, and who tries to do without copies another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

# Speculation's share of all time: until it is in debt, and in debt. A first request in which nothing pays
# loses CREDIT, and the latter of what follows; each request after it one step at the former. In replays with
# 0.03 for both up to half a percent more was lost at worst, without gaining more. 0.015 in debt lost half a
# percent less, and took twice as long to find out that drafts pay again; with 0.02 for both draft models
# gained one percent less.
SHARE: Final = 0.03
SHARE_IN_DEBT: Final = 0.02
# plain steps that may be lost before the ledger is in debt: with none draft models gained one percent less in
# texts, and 20 were as good as no difference of shares.
CREDIT: Final = 10.0
# usual steps after which a gain, a loss, or the credit counts a third: some requests, as a kind of text lasts
GAIN_LIFE: Final = 1000.0
# plain steps. What it takes to find out what eight widths cost and whether drafts hold: in replays 4 was too
# little to begin with drafts that paid, 6 lost a percent more.
CAPACITY: Final = 5.0


@dataclass(slots=True)
class LossLedger:
    """Starts full."""

    level: float = CAPACITY  # usual steps
    share: float = SHARE
    share_in_debt: float = SHARE_IN_DEBT
    gain: float = CREDIT  # usual steps gained lately, less those lost, and the credit; not above 0: in debt
    n_sharers: int = 1  # of the last step

    def begin_request(self) -> None:
        """Another request is another text: it is not in debt before it has lost a step.

        In a batch the others' debts stay: what they lose together each of them sees a part of, and one of
        three useless drafters, in short requests, lost 8 % of the time in replays instead of 5.
        """
        if self.n_sharers == 1:
            self.gain = max(self.gain, 1.0)

    def book(self, n_steps: float, n_gained: float, n_sharers: int = 1) -> None:
        """A step took as long as `n_steps` usual ones and emitted as much as `n_gained` of them.

        `n_sharers`: how many book steps of the same time, as the sequences of a batch do.
        """
        self.n_sharers = n_sharers
        share = self.share if self.gain > 0.0 else self.share_in_debt
        earned = share * n_steps / n_sharers
        self.gain = self.gain * math.exp(-n_steps / GAIN_LIFE) + n_gained - n_steps
        self.level = min(CAPACITY, self.level + earned + n_gained - n_steps)

    def can_lose(self, n_steps: float, n_once: float = 0.0) -> bool:
        """Whether `n_steps` usual steps may be lost now, and `n_once` at first.

        `n_steps` below 0: each step gains so many, even if things go badly.
        """
        if n_steps < 0.0:
            return self.level > n_once - CAPACITY
        return self.level > 0.0 and self.level >= n_steps + n_once

    def appetite(self) -> float:
        """For risk: 1 when full, 0 when empty."""
        return max(0.0, self.level / CAPACITY)
