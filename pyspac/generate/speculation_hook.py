"""Speculation control in the decode loop, as a `StepHook` around the split's.

In: a `Speculation`, the drafter, the hook of the split (or none). Out: a hook that limits drafts and
hears of every step; `drafter` is what the loop must draft with. While the controller rests, plain steps are
put down and told of together: between two passes caches are cold, and looking takes tens of microseconds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspac.engine.step import StepRecord
from pyspac.generate.drafting import Drafter, FreeDrafter
from pyspac.generate.ngram_drafter import NgramDrafter
from pyspac.generate.place_limit import MatchLimit, PlaceLimit
from pyspac.generate.shadow import ShadowDrafter
from pyspac.model import spec_types
from pyspac.speculation.controller import Controller
from pyspac.speculation.cost_table import MaskCosts
from pyspac.speculation.forecast import Forecast, ForecastBase
from pyspac.speculation.manager import Speculation
from pyspac.speculation.placed_forecast import MatchForecast, ModelForecast

if TYPE_CHECKING:
    from pyspac.generate.decode import StepHook
    from pyspac.generate.options import RunOptions


def forecast_for(spec_type: str) -> type[ForecastBase]:
    """Which `forecast` suits the drafter of this name; `steered` has the drafter ask it."""
    if spec_type == spec_types.NGRAM:
        return MatchForecast
    return Forecast if spec_types.is_free(spec_type) else ModelForecast


def new_speculation(options: RunOptions, n_draft_max: int) -> Speculation | None:
    """Draft lengths of all generations of a session; None: they are fixed."""
    if not options.has_controller:
        return None
    table = MaskCosts() if options.uses_masks else None
    forecast = forecast_for(options.effective_spec_type)
    return Speculation(options.controller, n_draft_max=n_draft_max, table=table, forecast=forecast)


def steered(drafter: Drafter, controller: Controller) -> Drafter:
    """The drafter, with drafts limited by place or watched in the shadow, as the controller wants it."""
    if isinstance(controller, MatchForecast):
        assert isinstance(drafter, NgramDrafter)
        return MatchLimit(drafter, controller)
    if isinstance(controller, ModelForecast):
        return PlaceLimit(drafter, controller)
    if isinstance(drafter, FreeDrafter) and controller.wants_shadow:
        shadow = ShadowDrafter(drafter, controller.n_draft_max, controller.observe_shadow)
        controller.watch_shadow(shadow.compare)
        return shadow
    return drafter


class SpeculationHook:
    """One generation; make a new one for each, around the same `Speculation`."""

    def __init__(
        self,
        speculation: Speculation,
        drafter: Drafter,
        inner: StepHook | None = None,
    ) -> None:
        self.speculation = speculation
        self.controller: Controller = speculation.begin()
        self.inner = inner
        self.drafter = steered(drafter, self.controller)
        self._last_ns = time.perf_counter_ns()
        # steps that the controller does not know of yet, and how long each ended behind the one before
        self._untold: list[tuple[StepRecord, float]] = []
        self._was_plain = True  # whether the last step was plain

    def n_draft_limit(self) -> int | None:
        """See StepHook: the smaller of the controller's and the inner hook's."""
        limit = self.controller.next_n_draft()
        inner = self.inner.n_draft_limit() if self.inner else None
        return limit if inner is None else min(limit, inner)

    def after_prompt(self) -> None:
        if self.inner:
            self.inner.after_prompt()
        self._step_us()

    def after_step(self, record: StepRecord) -> None:
        if self.inner:
            self.inner.after_step(record)
        self._untold.append((record, self._step_us()))
        self.controller.n_untold = len(self._untold)
        was_plain, self._was_plain = self._was_plain, record.is_plain
        if len(self._untold) >= self.controller.n_rest or not (was_plain and record.is_plain):
            self.finish()
            self._step_us()  # what looking takes is not the draft length's fault

    def finish(self) -> None:
        """Have the controller look at the steps since the last time; also once the output is at its end."""
        steps, self._untold = self._untold, []
        self.controller.n_untold = 0
        for record, us in steps:
            record.overhead_us = max(0.0, us - record.total_us)
            self.controller.observe(record)

    def look_ahead(self, tokens: Sequence[int]) -> None:
        if self.inner:
            self.inner.look_ahead(tokens)

    def _step_us(self) -> float:
        """Time since the last call: the whole step, in which speculation saves what a step costs besides."""
        before, self._last_ns = self._last_ns, time.perf_counter_ns()
        return (self._last_ns - before) / 1e3
