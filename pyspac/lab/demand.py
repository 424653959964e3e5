"""What a layer asks for, and the arrays in which the lab speaks of experts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.intp]  # il * n_expert + ie: an expert of any layer as one number, a "cell" below
Tokens = npt.NDArray[np.intp]  # rows of the trace
Indices = npt.NDArray[np.intp]  # positions in another array
Times = npt.NDArray[np.int64]  # step * n_layer + il
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Demand:
    """What one layer asks for in one step: distinct experts in the order in which they come up."""

    il: int
    keys: Keys  # [n]
    rows: npt.NDArray[np.int64]  # [n] activations
    weight: Floats  # [n] sum of router weights over the rows
    rank: npt.NDArray[np.int64]  # [n] best rank among the rows, 0: first choice
    lost: float = 0.0  # router weight that a routing policy gave away


def fold(il: int, keys: Keys, weight: npt.NDArray[np.floating], rank: npt.NDArray[np.intp]) -> Demand:
    """Fold [n_pair] (token, expert) pairs into distinct experts, in the order of their first appearance."""
    distinct, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    rows = np.bincount(inverse, minlength=len(distinct))
    weights = np.bincount(inverse, weight, len(distinct)).astype(np.float64)
    best = np.full(len(distinct), 2**31, np.int64)
    np.minimum.at(best, inverse, rank)
    return Demand(il, distinct[order], rows[order].astype(np.int64), weights[order], best[order])
