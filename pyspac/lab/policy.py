"""What a policy is: four small base classes, what they see of a run, and the registry of names.

A policy is one class in one file: its docstring says the idea, where it comes from, and its one knob.
Register it with `@register("eviction", "name")`; a file outside the package is loaded with `load_file`
(`--policy-file`).
"""

from __future__ import annotations

import importlib.util
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from pyspac.errors import ConfigError, PyspacError
from pyspac.lab.demand import NEVER, Bools, Demand, Floats, Keys
from pyspac.lab.setup import parse
from pyspac.lab.state import RunState

__all__ = [  # all that a policy's file needs
    "DIMENSIONS",
    "DROP",
    "FETCH",
    "HOST",
    "NEVER",
    "SUBSTITUTE",
    "Bools",
    "Demand",
    "Eviction",
    "Fate",
    "Floats",
    "Keys",
    "Miss",
    "MissPlan",
    "Policy",
    "Prefetch",
    "Routing",
    "find",
    "load_builtin",
    "load_file",
    "names",
    "parse",
    "register",
]

Dimension = Literal["eviction", "prefetch", "miss", "routing"]
DIMENSIONS: Final[tuple[Dimension, ...]] = ("eviction", "prefetch", "miss", "routing")


class Fate(IntEnum):
    """What happens to an expert that is asked for and not resident."""

    FETCH = 0  # copy it now; the layer waits
    HOST = 1  # compute it on the host
    DROP = 2  # leave it out
    SUBSTITUTE = 3  # compute a resident expert instead


# plain integers: an enum's members are slow to look up in a hot loop
FETCH, HOST, DROP, SUBSTITUTE = (int(fate) for fate in Fate)


@dataclass(slots=True)
class MissPlan:
    """One entry per missing expert."""

    fate: npt.NDArray[np.int8]  # [n] Fate
    share: Floats | None = None  # [n] of the expert's bytes that a fetch moves; None: all


class Policy:
    """Base of all policies. `run` gives access to cache, machine, workload and the present step."""

    name: ClassVar[str] = ""
    dimension: ClassVar[str] = ""
    knobs: ClassVar[dict[str, float]] = {}  # name: default

    def __init__(self, run: RunState, **knobs: float) -> None:
        """Set every knob as an attribute; ConfigError names an unknown one."""
        self.run = run
        for key, value in {**self.knobs, **knobs}.items():
            if key not in self.knobs:
                raise ConfigError(f"{self.name}:{key}", value, ", ".join(self.knobs) or "no knob")
            setattr(self, key, value)
        self.start()

    def start(self) -> None:
        """Allocate state."""

    def begin_step(self) -> None:
        """Prepare for a step: drafting, if any, begins now."""

    def end_step(self) -> None:
        """Look back: the step's layers have all run."""


class Eviction(Policy):
    """Decides who leaves. The base class evicts the least `worth`; ties by lowest slot."""

    may_bypass: ClassVar[bool] = False  # a newcomer that is worth least is used and not kept
    is_fixed: ClassVar[bool] = False  # what is resident at the start stays, nothing comes
    worth: Floats  # [n_layer * n_expert]

    def start(self) -> None:
        """All experts are worth the same."""
        self.worth = np.zeros(self.run.n_cell)

    def preload(self) -> Keys:
        """Return what is resident before the first step (loaded for free)."""
        return np.zeros(0, np.intp)

    def use(self, demand: Demand, is_hit: Bools) -> None:
        """Note that a layer asks for experts."""

    def loaded(self, key: int) -> None:
        """Note that a copy into a slot has completed."""

    def evicted(self, key: int) -> None:
        """Note that an expert has left."""

    def rank(self, candidates: Keys) -> Floats:
        """Return [n] what each candidate is worth now; the lowest leaves first."""
        return self.worth[candidates]

    def may_leave(self, candidates: Keys, newcomer: int) -> Bools | None:
        """Return [n] which candidates may make room for a prefetched newcomer; None: all."""
        return None

    def runs_on_device(self, keys: Keys) -> Bools | None:
        """Return [n] which residents are computed where they are, the others on the host; None: all."""
        return None

    def victims(self, candidates: Keys, n: int) -> npt.NDArray[np.intp]:
        """Return indices of the n candidates that leave, first one first."""
        rank = self.rank(candidates)
        if n == 1:
            return np.array([rank.argmin()])
        return np.argsort(rank, kind="stable")[:n]


class Prefetch(Policy):
    """Decides what to copy before it is asked for, with `self.run.prefetch(keys)`."""

    expires: ClassVar[bool] = True  # waiting copies for a layer that has run are dropped

    def after_router(self, demand: Demand) -> None:
        """React: this layer's experts are known and its misses are on their way."""


class Miss(Policy):
    """Decides what happens to experts that are not resident."""

    def handle(self, demand: Demand, missing: npt.NDArray[np.intp]) -> MissPlan:
        """Return the fate of demand.keys[missing]."""
        raise NotImplementedError


class Routing(Policy):
    """May change what the router selected."""

    def route(self, demand: Demand) -> Demand:
        """Return the demand to serve."""
        return demand


PolicyClass = TypeVar("PolicyClass", bound=type[Policy])
_REGISTRY: dict[str, dict[str, type[Policy]]] = {dimension: {} for dimension in DIMENSIONS}
_is_loaded = False


def register(dimension: Dimension, name: str) -> Callable[[PolicyClass], PolicyClass]:
    """Return a class decorator that makes a policy known by name."""

    def add(cls: PolicyClass) -> PolicyClass:
        cls.name, cls.dimension = name, dimension
        _REGISTRY[dimension][name] = cls
        return cls

    return add


def load_builtin() -> None:
    """Import every policy of the package."""
    global _is_loaded
    if _is_loaded:
        return
    _is_loaded = True
    for dimension in DIMENSIONS:
        package = import_module(f"pyspac.lab.{dimension}")
        for module in pkgutil.iter_modules(package.__path__):
            import_module(f"{package.__name__}.{module.name}")


def load_file(path: Path) -> None:
    """Import a file that registers policies of its own; PyspacError if it fails."""
    spec = importlib.util.spec_from_file_location(f"pyspac_policy_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError("--policy-file", str(path), "a Python file that registers policies")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise PyspacError(f"{path}: importing this policy file failed: {error!r}") from error


def names(dimension: str) -> list[str]:
    """Return the known names, sorted."""
    load_builtin()
    return sorted(_REGISTRY[dimension])


def find(dimension: str, name: str) -> Any:
    """Return a policy class; ConfigError lists the known names."""
    load_builtin()
    if name not in _REGISTRY[dimension]:
        raise ConfigError(f"--{dimension}", name, ", ".join(names(dimension)))
    return _REGISTRY[dimension][name]
