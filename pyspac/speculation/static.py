"""The same draft length always: `static`, and `off` with none."""

from __future__ import annotations

from pyspac.engine.step import StepRecord
from pyspac.speculation.controller import Controller, Shared


class Static(Controller):
    """A fixed draft length: the cap."""

    name = "static"

    def __init__(self, shared: Shared, n_draft: int | None = None) -> None:
        """`n_draft` None: the cap."""
        super().__init__(shared)
        self._n_draft = shared.n_draft_max if n_draft is None else min(n_draft, shared.n_draft_max)
        self._decide("set", self._n_draft, why="fixed")

    def next_n_draft(self) -> int:
        return self._n_draft

    def _observe(self, record: StepRecord) -> None:
        pass


class Off(Static):
    """No speculation."""

    name = "off"

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared, 0)
