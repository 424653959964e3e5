"""Where a simulation stands: cache, link, clock, books and the last decision. The simulator moves it on.

Policies see it only through `view.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pyspac.errors import ConfigError
from pyspac.lab.books import Books
from pyspac.lab.cache import ExpertCache, divide_slots
from pyspac.lab.link import Link
from pyspac.lab.machine import Machine
from pyspac.lab.setup import Setup
from pyspac.lab.workload import Workload


@dataclass(slots=True)
class Decision:
    """What the shipping scheduler decided last, as the engine applied it; nothing without a scheduler."""

    utility: npt.NDArray[np.uint8]  # [n_cell]
    tau: npt.NDArray[np.uint8]  # [n_layer]
    is_obeyed: bool = False  # its plan is carried out, so that the engine's rules hold
    fills: bool = False  # what was just used takes free slots at once, as in the engine


class RunState:
    """One workload on one machine, with an empty cache and an idle link."""

    def __init__(self, workload: Workload, setup: Setup, machine: Machine, capacity_bytes: int) -> None:
        """Make cache and link; ConfigError if a layout group gets no slot."""
        self.workload, self.setup, self.machine = workload, setup, machine
        self.capacity_bytes = capacity_bytes
        self.trace = workload.trace
        g = self.trace.geometry
        self.geometry = g = g.with_own_slots() if setup.per_layer else g
        self.n_cell = g.n_layer * g.n_expert
        self.books = Books(g.n_layer, setup.n_first)
        self.group_slots = divide_slots(capacity_bytes, g)
        if min(self.group_slots) < 1:
            what = "layer" if setup.per_layer else "layout group"
            raise ConfigError("--capacity", setup.capacity, f"room for one expert of each {what}")
        self.cache = ExpertCache(g, self.group_slots, self.books)
        self.link = Link(machine, self.cache)
        self.decision = Decision(np.zeros(self.n_cell, np.uint8), np.ones(g.n_layer, np.uint8))
        self.now_us = 0.0
        self.step = -1  # index of the running one
        self.il = 0  # layer that runs
