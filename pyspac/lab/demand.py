"""What a layer asks for, and the arrays in which the lab speaks of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

NEVER: Final = 2**62  # next use of an expert that is not used again

Keys = npt.NDArray[np.intp]  # il * n_expert + ie
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(slots=True)
class Demand:
    """What one layer asks for in one step: distinct experts in the order in which they come up."""

    il: int
    keys: Keys  # [n]
    rows: npt.NDArray[np.int64]  # [n] activations
    weight: Floats  # [n] sum of router weights over the rows
    rank: npt.NDArray[np.int64]  # [n] best rank among the rows, 0: first choice
    next_use: npt.NDArray[np.int64]  # [n] when the expert is asked for again (step * n_layer + il), or NEVER
    lost: float = 0.0  # router weight that a routing policy gave away
