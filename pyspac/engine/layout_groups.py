"""Which layers share slots: a board in, dense arrays over layout groups out."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyspac.engine.board import Board
from pyspac.errors import UsageError


def _index(layers: NDArray[np.intp]) -> NDArray[np.intp] | slice:
    """Return a slice where layers follow each other, as they mostly do: it copies nothing."""
    if len(layers) == 0 or layers[-1] - layers[0] + 1 != len(layers):
        return layers
    return slice(int(layers[0]), int(layers[-1]) + 1)


class LayoutGroups:
    """Which layers share slots: dense arrays over layout groups 0 .. n_group - 1, read once from a board."""

    def __init__(self, board: Board) -> None:
        """Read group, group_slots and expert_bytes; layers that are not split count nowhere."""
        self.is_split = np.asarray(board.expert_bytes) > 0  # [n_layer]
        if not self.is_split.any():
            raise UsageError(
                "the board has no split layer: give one whose engine splits at least one MoE layer"
            )
        self.of_layer = np.where(self.is_split, board.group, 0).astype(np.intp)  # [n_layer]
        self.n_group = int(self.of_layer.max()) + 1
        self._find_members()
        self.slots = np.zeros(self.n_group, np.int64)  # [n_group]
        self.slots[self.of_layer[self.is_split]] = board.group_slots[self.is_split]
        self._all_split, self._all_slots = self.is_split, self.slots.copy()
        self.n_expert = board.n_expert
        self.expert_bytes = np.zeros(self.n_group, np.int64)  # [n_group] largest of the group's layers
        np.maximum.at(self.expert_bytes, self.of_layer, board.expert_bytes.astype(np.int64))
        self.n_device = board.n_device
        self.device_of_layer = board.layer_device.astype(np.intp)  # [n_layer]
        self.device = np.zeros(self.n_group, np.intp)  # [n_group], whose slots they are
        self.device[self.of_layer[self.is_split]] = self.device_of_layer[self.is_split]

    def _find_members(self) -> None:
        is_member = (np.arange(self.n_group)[:, None] == self.of_layer) & self.is_split
        self.layers = [_index(np.flatnonzero(row)) for row in is_member]  # of each group
        self.onehot: NDArray[np.float64] = is_member.astype(np.float64)  # [n_group, n_layer]
        self.is_all_split = bool(self.is_split.all())

    def set_aside(self, is_aside: NDArray[np.bool_]) -> None:
        """Leave out these layers [n_layer], and the slots of all of their experts, from now on."""
        is_aside = is_aside & self._all_split
        n_aside = np.bincount(self.of_layer[is_aside], minlength=self.n_group)
        self.is_split = self._all_split & ~is_aside
        self.slots = np.maximum(self._all_slots - n_aside * self.n_expert, 0)
        self._find_members()

    def count(self, mask: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Count [n_group] the experts of `mask` [n_layer, n_expert] in layers that are split."""
        return np.array([np.count_nonzero(mask[layers]) for layers in self.layers])

    def total(self, per_layer: NDArray[Any]) -> NDArray[np.float64]:
        """Sum over the layers of each group: [n_layer, ...] -> [n_group, ...]."""
        return np.asarray(self.onehot @ per_layer)
