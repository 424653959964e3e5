"""The loss ledger: how much time speculation may still lose against plain decoding.

In: what each step took and emitted, in plain steps. Out: a balance. It earns SHARE of all time, gains fill
it, losses drain it, and it never holds more than CAPACITY: so over any stretch of n steps speculation loses
at most CAPACITY + SHARE * n plain steps and what its last step overdrew. Where a gain is all but certain it
may be overdrawn, by CAPACITY once more: then nothing is lost unless the forecast is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# of all time, earned. A stream of 500 tokens loses this, CAPACITY's 1 % and what single steps overdraw:
# together 6 %. In replays 0.03 lost a percent less where nothing holds; draft models gained one less.
SHARE: Final = 0.04
# plain steps. What it takes to find out what eight widths cost and whether drafts hold: in replays 4 was too
# little to begin with drafts that paid, 6 lost a percent more.
CAPACITY: Final = 5.0


@dataclass(slots=True)
class LossLedger:
    """Starts full."""

    level: float = CAPACITY  # plain steps

    def book(self, n_steps: float, n_gained: float, n_sharers: int = 1) -> None:
        """A step took as long as `n_steps` plain ones and emitted as much as `n_gained` of them.

        `n_sharers`: how many book steps of the same time, as the sequences of a batch do.
        """
        earned = SHARE * n_steps / n_sharers
        self.level = min(CAPACITY, self.level + earned + n_gained - n_steps)

    def can_lose(self, n_steps: float, n_once: float = 0.0) -> bool:
        """Whether `n_steps` plain steps may be lost now, and `n_once` at first.

        `n_steps` below 0: each step gains so many, even if things go badly.
        """
        if n_steps < 0.0:
            return self.level > n_once - CAPACITY
        return self.level > 0.0 and self.level >= n_steps + n_once

    def appetite(self) -> float:
        """For risk: 1 when full, 0 when empty."""
        return max(0.0, self.level / CAPACITY)
