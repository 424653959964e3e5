"""What policies may ask of a run: how things stand, never how they will be. Nothing here can be written.

`OracleView` knows the future as well. Only policies that declare themselves clairvoyant are given one, and
they are bounds.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from pyspac.lab.cache import ExpertCache
from pyspac.lab.demand import Bools, Floats, Keys
from pyspac.lab.link import Link
from pyspac.lab.predict.assumed import AssumedPredictor
from pyspac.lab.predict.choose import choose_predictor
from pyspac.lab.predict.predictor import Predictor, Source
from pyspac.lab.state import Decision, RunState

Scalar = TypeVar("Scalar", bound=np.generic)


def _read_only(array: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    """Return the same memory, which changes as the run goes on but cannot be written through this."""
    view: npt.NDArray[Scalar] = array.view()
    view.flags.writeable = False
    return view


class CacheView:
    """The device's slots."""

    def __init__(self, cache: ExpertCache) -> None:
        """Look at a cache."""
        self._cache = cache
        self.group_of = _read_only(cache.group_of)  # [n_cell] layout group, which shares its slots
        self.bytes_of = _read_only(cache.bytes_of)  # [n_cell]
        self.residency = _read_only(cache.residency)  # [n_cell] pyspac.engine.board.Residency
        self.last_used = _read_only(cache.last_used)  # [n_cell] forward pass
        self.share = _read_only(
            cache.share
        )  # [n_cell] of its bytes that the copy holds; below 1: low precision
        self.group_slots = tuple(len(owner) for owner in cache.owner)  # by layout group

    def is_resident(self, keys: Keys) -> Bools:
        """Return [n] which experts may be computed on the device now."""
        return self._cache.is_resident(keys)

    def n_free(self, group: int) -> int:
        """Return how many slots of a layout group are empty."""
        return len(self._cache.free[group])

    def owners(self, group: int) -> Keys:
        """Return who holds a layout group's slots, by slot: residents, and one whose copy is under way."""
        owner = self._cache.owner[group]
        return owner[owner >= 0]


class LinkView:
    """The copies' queue."""

    def __init__(self, state: RunState) -> None:
        """Look at a link."""
        self._state = state
        self._link: Link = state.link

    @property
    def n_waiting(self) -> int:
        """Copies in the queue."""
        return len(self._link.waiting)

    @property
    def free_in_us(self) -> float:
        """How long the copy in flight still takes; 0 if there is none."""
        return self._link.in_flight_us(self._state.now_us)


class DecisionView:
    """The shipping scheduler's last decision; zeros where no policy of the run uses the scheduler."""

    def __init__(self, decision: Decision) -> None:
        """Look at a decision."""
        self._decision = decision
        self.utility = _read_only(decision.utility)  # [n_cell] uint8
        self.tau = _read_only(decision.tau)  # [n_layer] uint8: experts of this utility belong on the device

    @property
    def is_obeyed(self) -> bool:
        """Whether the prefetch policy carries the plan out, so that the engine's rules hold."""
        return self._decision.is_obeyed

    def is_hot(self, keys: Keys, layer: npt.NDArray[np.intp]) -> Bools:
        """Return [n] which experts belong on the device."""
        return np.asarray(self.utility[keys] >= self.tau[layer])


class View:
    """One run, as a policy sees it. A cell is one expert of one layer: key = il * n_expert + ie."""

    def __init__(self, state: RunState) -> None:
        """Look at a run."""
        self._state = state
        self.geometry = g = state.geometry
        self.n_layer, self.n_expert, self.n_cell = g.n_layer, g.n_expert, state.n_cell
        self.layer_of = _read_only(np.repeat(np.arange(g.n_layer), g.n_expert))  # [n_cell]
        self.machine = state.machine  # its speeds, as assumed
        self.capacity_bytes = state.capacity_bytes
        self.k = state.workload.k  # longest draft
        self.cache = CacheView(state.cache)
        self.link = LinkView(state)
        self.decision = DecisionView(state.decision)

    @property
    def step(self) -> int:
        """The running step, counted from 0."""
        return self._state.step

    @property
    def il(self) -> int:
        """The layer that runs, or has run last."""
        return self._state.il

    @property
    def now_us(self) -> float:
        """Time since the start."""
        return self._state.now_us

    def prompt_counts(self) -> Floats:
        """Return [n_cell] activations in the prompt."""
        counts = np.zeros(self.n_cell)
        prompt = self._state.workload.prompt
        for demand in prompt.layers if prompt is not None else []:
            counts[demand.keys] += demand.rows
        return counts

    def predictor(self, source: Source, accuracy: float | None = None) -> Predictor:
        """Return who guesses the experts of layers that have not run: recorded, or assumed as `--accuracy`.

        With an accuracy they are assumed, whatever the trace recorded.
        """
        setup, trace = self._state.setup, self._state.trace
        if accuracy is not None:
            return AssumedPredictor(trace, accuracy, setup.seed)
        return choose_predictor(source, trace, setup.predictor_accuracy, setup.seed)


class OracleView(View):
    """The same, and the future."""

    def __init__(self, state: RunState) -> None:
        """Look at a run and at all that it will ask for."""
        super().__init__(state)
        self.future = state.workload.future
