"""How long to wait before something that died is started again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

LONG_LIFE_S: Final = 10.0  # what lived longer is given a fresh start
STEP_S: Final = 0.5


@dataclass(slots=True)
class Backoff:
    """Delays that double with every short life, from `first_s` to `longest_s`."""

    first_s: float
    longest_s: float
    _delay_s: float | None = None

    def after(self, life_s: float) -> float:
        """The delay after a life of `life_s` seconds."""
        if self._delay_s is None or life_s >= LONG_LIFE_S:
            self._delay_s = self.first_s
        else:
            self._delay_s = min(self.longest_s, max(STEP_S, 2 * self._delay_s))
        return self._delay_s
