"""Who holds the slots: read off the residency once per step, for the balancer and the plan."""

from __future__ import annotations

from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from pyspac.engine.board import Board, Residency
from pyspac.engine.layout_groups import LayoutGroups

_ABSENT: Final = int(Residency.ABSENT)  # plain integers: numpy compares with an enum's in 64 bits
_RESIDENT: Final = int(Residency.RESIDENT)


class Occupancy:
    """One residency [n_layer, n_expert], and what follows from it; `read` renews all."""

    def __init__(self, board: Board) -> None:
        """All slots are empty."""
        self.groups = LayoutGroups(board)
        self._bytes = board.expert_bytes.astype(np.int64)  # [n_layer]
        self.read(np.full((board.n_layer, board.n_expert), Residency.ABSENT, np.uint8))

    def read(self, residency: NDArray[np.uint8]) -> Self:
        """Take in the residency of now."""
        self.is_held = residency != _ABSENT  # queued, loading or resident
        self.is_resident = residency == _RESIDENT
        self.n_free = self.groups.slots - self.groups.count(self.is_held)  # [n_group]
        under_way = np.flatnonzero(self.is_held & ~self.is_resident)  # experts that are queued or loading
        layer = under_way // residency.shape[1]
        n_bytes, n_device = self._bytes[layer], self.groups.n_device
        self.under_way_bytes = (  # [n_device]
            [int(n_bytes.sum())]
            if n_device == 1
            else np.bincount(self.groups.device_of_layer[layer], n_bytes, n_device).astype(int).tolist()
        )
        return self
