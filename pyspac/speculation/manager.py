"""All sequences of a run: one controller each, by server slot, and what they share.

In: a controller's name and the cap. Out: `next_n_draft(slot)` and `observe(record)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pyspac.engine.step import StepRecord
from pyspac.errors import ConfigError
from pyspac.speculation.cascade import Cascade
from pyspac.speculation.controller import Controller, Decision, Shared
from pyspac.speculation.cost_table import CostTable
from pyspac.speculation.forecast import Forecast, ForecastBase
from pyspac.speculation.static import Off, Static

MakeController = Callable[[Shared], Controller]

DEFAULT_CONTROLLER: Final = "forecast"
FIXED: Final = "static"  # draft lengths stay as they are
DEFAULT_DRAFT_MAX: Final = 4  # of a fixed draft length
DEFAULT_DRAFT_CAP: Final = 8  # of one that is controlled
CONTROLLERS: Final[dict[str, MakeController]] = {
    "forecast": Forecast,
    "cascade": Cascade,
    "static": Static,
    "off": Off,
}


def parse_controller(text: str) -> MakeController:
    """Read a name of CONTROLLERS, or "auto". Raises ConfigError."""
    name = DEFAULT_CONTROLLER if text == "auto" else text
    if name not in CONTROLLERS:
        raise ConfigError("--speculation", text, f"auto, or one of {', '.join(CONTROLLERS)}")
    return CONTROLLERS[name]


def choose_controller(name: str | None, n_draft_max: int | None, *, must_repeat: bool = False) -> str:
    """Who decides by default: a draft length that was asked for is kept, else the best controller.

    `must_repeat`: the text has to be the same in every run, so drafts must not depend on measured times.
    """
    if name is not None:
        parse_controller(name)
        return name
    return FIXED if n_draft_max is not None or must_repeat else DEFAULT_CONTROLLER


def choose_draft_max(wanted: int | None, controller: str) -> int:
    """Tokens drafted per step at most, if anything drafts."""
    if wanted is not None:
        return wanted
    return DEFAULT_DRAFT_MAX if controller == FIXED else DEFAULT_DRAFT_CAP


class Speculation:
    """Draft lengths for every slot."""

    def __init__(
        self,
        controller: str | MakeController = DEFAULT_CONTROLLER,
        *,
        n_draft_max: int,
        lag_steps: int = 0,
        table: CostTable | None = None,
        forecast: type[ForecastBase] = Forecast,
    ) -> None:
        """`n_draft_max`: the cap; `lag_steps`: steps until a new limit takes effect.

        `table`: what steps cost, by default an empty `CostTable`. `forecast`: the class that "forecast" and
        "auto" stand for; MatchForecast needs the engine's `ngram`.
        """
        make = parse_controller(controller) if isinstance(controller, str) else controller
        self.make: MakeController = forecast if make is Forecast else make
        self.shared = Shared(n_draft_max=n_draft_max, lag_steps=lag_steps, table=table or CostTable())
        self.slots: dict[int, Controller] = {}

    def begin(self, slot: int = 0) -> Controller:
        """A new request in this slot."""
        self.slots[slot] = self.make(self.shared)
        return self.slots[slot]

    def end(self) -> None:
        """All requests are over, and their drafters may go. What was learned stays."""
        self.slots.clear()

    def follow(self, first: StepRecord) -> None:
        """A new request in its server slot, heard of by its first step, whose length was decided before it.

        The controller that decided it takes the step in (its cost, the ledger), then a new one begins.
        """
        self.observe(first)
        self.begin(first.server_slot)

    def slot(self, slot: int = 0) -> Controller:
        """The controller of a slot; a new one if there was none."""
        return self.slots[slot] if slot in self.slots else self.begin(slot)

    def next_n_draft(self, slot: int = 0) -> int:
        """The longest draft for the slot's next step."""
        return self.slot(slot).next_n_draft()

    def observe(self, record: StepRecord) -> None:
        """Take in one step of `record.server_slot`."""
        self.slot(record.server_slot).observe(record)

    def decisions(self, slot: int = 0) -> list[Decision]:
        """What the slot's controller decided, and why."""
        return list(self.slot(slot).decisions)
