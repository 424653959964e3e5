"""What a policy is: four small base classes. They are told events, they see a view, and they answer.

Methods `on_...` are told what has happened (`events.py`); the others are asked, and return a plan that the
simulator carries out. What a policy may know is the type of its `view` (`view.py`). A policy is one class in
one file: its docstring says the idea, where it comes from, and its knobs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, Final, Literal

import numpy as np
import numpy.typing as npt

from pyspac.errors import ConfigError, UsageError
from pyspac.lab.demand import Bools, Demand, Floats, Indices, Keys
from pyspac.lab.events import Access, Evicted, Loaded, Routed, StepBegun, StepOver
from pyspac.lab.predict.predictor import Predictor
from pyspac.lab.shipping import SchedulerSetup
from pyspac.lab.view import View

Dimension = Literal["eviction", "prefetch", "miss", "routing"]
DIMENSIONS: Final[tuple[Dimension, ...]] = ("eviction", "prefetch", "miss", "routing")


class Policy:
    """Base of all policies."""

    name: ClassVar[str] = ""  # set by `register`
    dimension: ClassVar[Dimension]
    knobs: ClassVar[Mapping[str, float]] = {}  # name: default; an int's values are whole numbers
    limits: ClassVar[Mapping[str, tuple[float, float]]] = {}  # name: least, most; others: any number
    is_clairvoyant: ClassVar[bool] = False  # a bound: its view is an OracleView
    needs_logits: ClassVar[bool] = False  # the trace has to hold the router's
    view: View

    def __init__(self, view: View, knobs: Mapping[str, float]) -> None:
        """Keep the view and the knobs' values; ConfigError names an unknown knob, or a value out of range."""
        for name, value in knobs.items():
            if name not in self.knobs:
                instead = (
                    f"give one of {', '.join(self.knobs)}" if self.knobs else "leave it out, it has none"
                )
                raise UsageError(f"{self.name} has no knob {name!r} (given: {value:g}): {instead}")
            self._check(name, value)
        self.view = view
        self.knob = {**self.knobs, **knobs}
        self.start()

    def _check(self, name: str, value: float) -> None:
        low, high = self.limits.get(name, (-math.inf, math.inf))
        is_whole = isinstance(self.knobs[name], int)
        if not (low <= value <= high and math.isfinite(value)) or (is_whole and value % 1):
            bounds = f" from {low:g} to {high:g}" if name in self.limits else ""
            wanted = f"a {'whole' if is_whole else 'finite'} number{bounds}"
            raise ConfigError(f"{self.name}:{name}", f"{value:g}", wanted)

    def start(self) -> None:
        """Allocate state."""

    def on_step_over(self, event: StepOver) -> None:
        """Look back: the step's layers have all run."""

    @classmethod
    def about(cls) -> str:
        """Return the idea in a sentence: how the policy's file begins."""
        text = (sys.modules[cls.__module__].__doc__ or "").strip()
        return " ".join(text.split("\n\n")[0].split())


class Eviction(Policy):
    """Decides who leaves. The base class evicts the least `worth`; ties by lowest slot."""

    dimension = "eviction"
    may_bypass: ClassVar[bool] = False  # a newcomer that is worth least is used and not kept
    is_fixed: ClassVar[bool] = False  # what is resident at the start stays, nothing comes
    ignores_capacity: ClassVar[bool] = False  # there is room for everything
    default_prefetch: ClassVar[str] = "none"  # what suits it, where `auto` is asked for
    default_miss: ClassVar[str] = "fetch"
    worth: Floats  # [n_cell]

    def start(self) -> None:
        """All experts are worth the same."""
        self.worth = np.zeros(self.view.n_cell)

    def preload(self) -> Keys:
        """Return what is resident before the first step (loaded for free)."""
        return np.zeros(0, np.intp)

    def on_access(self, access: Access) -> None:
        """Note that a layer asks for experts."""

    def on_loaded(self, event: Loaded) -> None:
        """Note that a copy into a slot has completed."""

    def on_evicted(self, event: Evicted) -> None:
        """Note that an expert has left."""

    def rank(self, candidates: Keys) -> Floats:
        """Return [n] what each candidate is worth now; the lowest leaves first."""
        return self.worth[candidates]

    def victims(self, candidates: Keys, n: int) -> Indices:
        """Return indices of the n candidates that leave, first one first; candidates come by slot."""
        rank = self.rank(candidates)
        if n == 1:
            return np.array([rank.argmin()])
        return np.argsort(rank, kind="stable")[:n]

    def may_leave(self, candidates: Keys, newcomer: int | None) -> Bools | None:
        """Return [n] which candidates may make room for a prefetched newcomer; None: all.

        A newcomer of None is one that a predictor expects.
        """
        return None

    def runs_on_device(self, keys: Keys) -> Bools | None:
        """Return [n] which residents are computed where they are, the others on the host; None: all."""
        return None

    def needs_host(self) -> bool:
        """Whether it leaves residents to the host, so that misses have to go there as well."""
        return False

    def scheduler_setup(self) -> SchedulerSetup | None:
        """Return how to run the shipping scheduler beside this policy; None: it does not ask for one."""
        return None


@dataclass(frozen=True, slots=True)
class Copies:
    """Experts to copy ahead, in this order; those that are not absent are passed over."""

    keys: Keys  # [n]
    level: int = 1  # higher levels go first
    at_us: float | None = None  # when they are asked for, while drafting; None: now


class Prefetch(Policy):
    """Decides what to copy before it is asked for. Copies are queued as they are yielded."""

    dimension = "prefetch"
    expires: ClassVar[bool] = True  # waiting copies for a layer that has run are dropped
    obeys_scheduler: ClassVar[bool] = False  # after each step the shipping scheduler's plan is carried out
    predictor: Predictor | None = None  # whom it believes; reports name it

    def waits_for_host(self) -> bool:
        """Whether copies begin only while the host reads no experts."""
        return False

    def while_drafting(self, event: StepBegun) -> Iterable[Copies]:
        """Return what to copy while the step's draft is made."""
        return ()

    def after_router(self, access: Access) -> Iterable[Copies]:
        """Return what to copy now: a layer's experts are known and its misses are on their way."""
        return ()


class Fate(IntEnum):
    """What happens to an expert that is asked for and not resident."""

    FETCH = 0  # copy it now; the layer waits
    HOST = 1  # compute it on the host
    DROP = 2  # leave it out
    SUBSTITUTE = 3  # compute a resident expert instead


# plain integers: an enum's members are slow to look up in a hot loop
FETCH, HOST, DROP, SUBSTITUTE = (int(fate) for fate in Fate)


@dataclass(frozen=True, slots=True)
class MissPlan:
    """What happens to n missing experts."""

    fate: npt.NDArray[np.int8]  # [n] Fate
    share: Floats | None = None  # [n] of the expert's bytes that a fetch moves; None: all
    admit: Copies | None = None  # for the next time


class Miss(Policy):
    """Decides what happens to experts that are not resident."""

    dimension = "miss"

    def leaves_to_host(self) -> bool:
        """Whether it copies nothing itself, as the engine: then free slots fill with what was just used."""
        return False

    def handle(self, access: Access) -> MissPlan:
        """Return the fate of the missing experts; there is at least one."""
        raise NotImplementedError


class Routing(Policy):
    """May change what the router selected."""

    dimension = "routing"
    is_lossy: ClassVar[bool] = False  # changes the routing, so that its future cannot be known

    def route(self, routed: Routed) -> Demand:
        """Return the demand to serve."""
        return routed.demand
