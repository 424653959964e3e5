"""Who holds the slots: read off the residency once per step, for the balancer and the plan."""

from __future__ import annotations

from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from pyspac.engine.board import BoardView, LayoutGroups, Residency

_ABSENT: Final = int(Residency.ABSENT)  # plain integers: numpy takes 3 us to make one of an enum's
_RESIDENT: Final = int(Residency.RESIDENT)


class Occupancy:
    """One residency [n_layer, n_expert], and what follows from it; `read` renews all in place."""

    def __init__(self, board: BoardView) -> None:
        """Nobody holds a slot."""
        self.groups = LayoutGroups(board)
        shape = board.n_layer, board.n_expert
        self.is_held = np.zeros(shape, bool)  # queued, loading or resident
        self.is_resident = np.zeros(shape, bool)
        self.n_free = self.groups.slots  # [n_group]
        self.under_way_bytes = 0  # of experts that are queued or loading
        self._bytes = board.expert_bytes.astype(np.int64)  # [n_layer]

    def read(self, residency: NDArray[np.uint8]) -> Self:
        """Take in the residency of now."""
        np.greater(residency, _ABSENT, out=self.is_held)
        np.equal(residency, _RESIDENT, out=self.is_resident)
        n_held = self.groups.count(self.is_held)
        self.n_free = [slots - held for slots, held in zip(self.groups.slots, n_held, strict=True)]
        self.under_way_bytes = self._bytes_under_way(sum(n_held))
        return self

    def _bytes_under_way(self, n_held: int) -> int:
        if n_held == np.count_nonzero(self.is_resident):
            return 0
        return int((self.is_held.sum(axis=1) - self.is_resident.sum(axis=1)) @ self._bytes)
