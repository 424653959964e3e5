"""The loss budget: how much time speculation may lose against plain decoding, as a leaky bucket.

In: each step's time and what plain decoding would have needed for its tokens. Out: whether there is anything
left to lose. The unit is one plain step. The bucket earns `share` of every step, gains fill it, losses drain
it, and it holds at most `capacity`: so over any stretch of n steps speculation loses at most
capacity + share * n plain steps, whatever estimates go wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SHARE: Final = 0.04  # where acceptance can be watched for nothing
SHARE_COSTLY: Final = 0.055  # where every look costs a draft and its verification
CAPACITY: Final = 6.0
OVERDRAFT: Final = 12.0  # of one step that took far more than was expected


@dataclass(slots=True)
class LossBudget:
    """A number between -OVERDRAFT and `capacity`; starts full."""

    share: float = SHARE  # of the time, earned per step
    capacity: float = CAPACITY  # plain steps
    level: float = CAPACITY

    def pay(self, step_us: float, n_emitted: int, base_us: float) -> None:
        """A step of `step_us` emitted `n_emitted` tokens; a plain step takes `base_us`."""
        n_steps = step_us / base_us
        level = self.level + self.share * n_steps + n_emitted - n_steps
        self.level = min(self.capacity, max(level, -OVERDRAFT))

    def can_lose(self, n_steps: float) -> bool:
        """Whether `n_steps` plain steps may be lost now."""
        return self.level >= n_steps
