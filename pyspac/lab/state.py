"""The state of one simulation: what policies read, and the one thing they may do.

The simulator moves it on. Policies hold a reference to it, and are known to it by what it asks of them alone:
so neither needs the other's module.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from pyspac.errors import ConfigError
from pyspac.lab.books import Books
from pyspac.lab.cache import ABSENT, Choice, ExpertCache, divide_slots
from pyspac.lab.demand import Keys
from pyspac.lab.link import Link
from pyspac.lab.machine import Machine
from pyspac.lab.setup import Setup, capacity_bytes, parse
from pyspac.lab.workload import Step, Workload


@dataclass(slots=True)
class LayerTimes:
    """What the balancer learns from, predicted: microseconds of one layer."""

    n_device: int = 0
    n_host: int = 0
    device_rows: int = 0
    host_rows: int = 0
    host_us: float = 0.0
    layer_us: float = 0.0


@dataclass(slots=True)
class StepTimes:
    """The same for a step."""

    draft_us: float = 0.0
    verify_us: float = 0.0
    layers: dict[int, LayerTimes] = field(default_factory=dict)


class Decisions(Protocol):
    """What the policies that share the shipping scheduler ask of it."""

    is_engine: bool

    def step(self) -> None:
        """Decide, once per step of the run."""

    def apply(self) -> None:
        """Take the decision over as the engine does."""


class RunState:
    """One workload on one machine, with an empty cache and an idle link."""

    def __init__(self, workload: Workload, setup: Setup, machine: Machine) -> None:
        """Make cache and link; ConfigError names what does not fit."""
        self.workload, self.setup, self.machine = workload, setup, machine
        self.trace = workload.trace
        self.geometry = g = self.trace.geometry
        self.n_expert, self.n_layer = g.n_expert, g.n_layer
        self.n_cell = g.n_layer * g.n_expert
        self.layer_of = np.repeat(np.arange(g.n_layer), g.n_expert)  # [n_cell]
        self.k = workload.k
        self.books = Books(g.n_layer)
        is_unbounded = parse(setup.eviction)[0] == "unbounded"
        budget = g.total_bytes if is_unbounded else capacity_bytes(setup.capacity, g.total_bytes)
        self.group_slots = divide_slots(budget, g)
        if min(self.group_slots) < 1:
            raise ConfigError("--capacity", setup.capacity, "room for one expert of each layout group")
        self.cache = ExpertCache(g, self.group_slots, self.books)
        self.link = Link(machine, self.cache)
        self.now = 0.0
        self.step_index = -1
        self.step: Step = workload.steps[0]
        self.il = 0
        self.times = StepTimes()
        self.eviction: Choice  # set by the simulator, before any other policy is made
        self.shipping: Decisions | None = None  # made by the policies that run the shipping scheduler

    def prefetch(self, keys: Keys, level: int = 1) -> None:
        """Queue copies of those experts that are absent; higher levels go first."""
        if self.eviction.is_fixed:
            return
        absent = keys[self.cache.residency[keys] == ABSENT]
        self.link.submit([(int(key), level) for key in absent], self.now)
