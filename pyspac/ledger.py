"""The loss ledger: how much time may still be lost against the usual way, by trying another one.

In: what each step took and emitted, in usual steps. Out: a balance. It earns a share of all time, gains fill
it, losses drain it, and it never holds more than its capacity: so over any stretch of n steps at most
`capacity + share * n` usual steps are lost, and what the last step overdrew. Where a gain is all but certain
it may be overdrawn, by the capacity once more: then nothing is lost unless the forecast is wrong.

Speculation has one against plain decoding, and who tries to do without copies another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# Speculation's share of all time. In replays draft models gained one percent less with 0.02.
SHARE: Final = 0.03
# plain steps. What it takes to find out what eight widths cost and whether drafts hold: in replays 4 was too
# little to begin with drafts that paid, 6 lost a percent more.
CAPACITY: Final = 5.0


@dataclass(slots=True)
class LossLedger:
    """Starts full."""

    level: float = CAPACITY  # usual steps
    share: float = SHARE

    def book(self, n_steps: float, n_gained: float, n_sharers: int = 1) -> None:
        """A step took as long as `n_steps` usual ones and emitted as much as `n_gained` of them.

        `n_sharers`: how many book steps of the same time, as the sequences of a batch do.
        """
        self.level = min(CAPACITY, self.level + self.share * n_steps / n_sharers + n_gained - n_steps)

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
