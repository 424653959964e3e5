"""The engine's own predictors, replayed: routers that were asked early, by what the trace recorded.

As engine/src/decide/{next-layer,draft-gate}.cpp and cache/ahead-loads.cpp beside them: what a layer is
expected to use keeps its slot until that layer runs; what is absent is copied before all else, as far as it
is sure to be there in time, behind what waits already. Asking takes no time here. A trace lacks two things
that the engine has: biases that select and do not weigh (DeepSeek-V3, GLM), and guesses for tokens that the
last layer leaves out, as a prompt's.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from pyspac.engine.ahead import DRAFT_GATE, NEXT_LAYERS, share
from pyspac.lab.cache import RESIDENT
from pyspac.lab.cutoff import cutoff_layer
from pyspac.lab.demand import Tokens
from pyspac.lab.events import Access, StepBegun
from pyspac.lab.predict.recorded import RECORDED, RecordedPredictor
from pyspac.lab.state import RunState

_TIME_WEIGHT: Final = 0.1  # of the latest forward in a layer's time, as in the engine


@dataclass(slots=True)
class AheadStats:
    """What was said and what came of it; experts are distinct ones of a layer in one forward."""

    n_predicted: int = 0
    n_chosen: int = 0  # by the routers of the layers that something was said about
    n_hit: int = 0  # both
    n_queued: int = 0
    n_refused: int = 0  # absent, but the copy would come too late or delay better ones
    n_dropped: int = 0  # queued, but their layer ran first, or there was no slot
    n_copied: int = 0
    n_copies_used: int = 0  # before they left


class LookAhead:
    """Base: says what layers will use, and keeps the books."""

    name: str

    def __init__(self, state: RunState, predictor: RecordedPredictor) -> None:
        """Look at a run that has not begun."""
        self.state, self.predictor = state, predictor
        self.stats = AheadStats()
        g = state.geometry
        self.layers = [il for il in range(g.n_layer) if g.expert_bytes[il]]
        self.layer_us = np.zeros(g.n_layer)  # from each layer with experts to the next one; 0: not known
        self._said: dict[int, set[int]] = {}  # keys by layer, of this forward
        self._copied: set[int] = set()  # by these copies, not used yet
        self._began_us = 0.0

    def while_drafting(self, event: StepBegun) -> None:
        """Say what can be said before the target runs."""

    def after_router(self, access: Access) -> None:
        """Say what can be said while a layer runs."""

    def layer_begins(self, access: Access) -> None:
        """Judge what was said about a layer, now that its router has run."""
        il, chosen = access.demand.il, set(access.demand.keys.tolist())
        self.state.link.drop_ahead(il)
        said = self._said.pop(il, None)
        if said is not None:
            self.stats.n_predicted += len(said)
            self.stats.n_chosen += len(chosen)
            self.stats.n_hit += len(said & chosen)
        hits = set(access.demand.keys[access.is_hit].tolist())
        self.stats.n_copies_used += len(hits & self._copied)
        self._copied = {key for key in self._copied - hits if self._is_resident(key)}
        self._note_time(il)

    def _is_resident(self, key: int) -> bool:
        return int(self.state.cache.residency[key]) == RESIDENT

    def _note_time(self, il: int) -> None:
        """Learn how long the layer before took."""
        index, now_us = self.layers.index(il), self.state.now_us
        if index:
            before = self.layers[index - 1]
            took, was = now_us - self._began_us, self.layer_us[before]
            self.layer_us[before] = took if was == 0 else was + _TIME_WEIGHT * (took - was)
        self._began_us = now_us

    def expect(self, il: int, tokens: Tokens, time_us: float | None) -> None:
        """Say what a layer will use of these tokens, as far as they have a guess.

        It runs in time_us, and what would come later is not copied; None: nothing is.
        """
        known = tokens[self.predictor.has_guess(il, tokens)]
        if not len(known):
            return
        keys = self.predictor.top(il, known, self.state.geometry.n_expert_used)
        said = self._said.setdefault(il, set())
        n_queued, cut = self.state.link.expect(keys, time_us, self.state.now_us, self)
        self.stats.n_queued += n_queued
        self.stats.n_refused += len(set(cut) - said)  # else another token's
        said.update(keys.tolist())

    def note_copied(self, key: int) -> None:
        """One of its copies has arrived."""
        self.stats.n_copied += 1
        self._copied.add(key)

    def note_dropped(self) -> None:
        """One of its copies was given up."""
        self.stats.n_dropped += 1

    def to_dict(self) -> dict[str, Any]:
        """Return the figures for reports; shares are None where there is nothing to divide by."""
        s = self.stats
        return {
            "name": self.name,
            "recall": share(s.n_hit, s.n_chosen),
            "precision": share(s.n_hit, s.n_predicted),
            "source": RECORDED,
            **asdict(s),
        }


class NextLayer(LookAhead):
    """A layer's router input through the router of a later layer."""

    def __init__(self, state: RunState, name: str) -> None:
        """`name`: of NEXT_LAYERS. TraceError if the trace does not hold it."""
        depth = NEXT_LAYERS[name]
        early = state.trace.early_logits
        if early is None or len(early) < depth:
            raise state.trace.without(f"early logits {depth} layers ahead", " --early")
        super().__init__(state, RecordedPredictor(early[depth - 1]))
        self.depth = depth
        self.name = name

    def after_router(self, access: Access) -> None:
        """Say what the layer `depth` further on will use."""
        index = self.layers.index(access.demand.il)
        if index + self.depth < len(self.layers):
            between = self.layers[index : index + self.depth]
            target = self.layers[index + self.depth]
            self.expect(target, access.tokens, float(self.layer_us[between].sum()))


class DraftGate(LookAhead):
    """The draft model's router inputs through the target's routers (SP-MoE), up to the cutoff layer."""

    name = DRAFT_GATE

    def __init__(self, state: RunState) -> None:
        """TraceError if the trace does not hold what the draft model's routers saw."""
        if state.trace.draft_logits is None:
            raise state.trace.without("draft-gate logits", " -md DRAFT --draft-gate")
        super().__init__(state, RecordedPredictor(state.trace.draft_logits))
        g, machine = state.geometry, state.machine
        self.draft_layer_us = machine.draft_us / g.n_layer
        self.cutoff = cutoff_layer(
            [g.n_expert_used] * g.n_layer,
            layer_us=self.draft_layer_us,
            copy_us=machine.copy_us(max(g.expert_bytes)),
            n_draft=state.workload.k,
            n_layer_draft=g.n_layer,
            n_experts_room=sum(state.group_slots),
        )

    def while_drafting(self, event: StepBegun) -> None:
        """Go through the draft's layers, token by token, at the times when it would have run them."""
        start_us, draft_us = self.state.now_us, self.state.machine.draft_us
        end_us = start_us + event.n_draft * draft_us
        starts_us = np.cumsum(self.layer_us) - self.layer_us
        for i in range(event.n_draft):
            for il in self.layers:
                self.state.now_us = start_us + i * draft_us + (il + 1) * self.draft_layer_us
                time_us = end_us - self.state.now_us + float(starts_us[il])
                is_within = il in self.layers[: self.cutoff]
                self.expect(il, event.tokens[i : i + 1], time_us if is_within else None)
        self.state.now_us = start_us

    def to_dict(self) -> dict[str, Any]:
        """Add the cutoff layer."""
        return super().to_dict() | {"cutoff_layer": self.cutoff}


def make_look_ahead(state: RunState) -> list[LookAhead]:
    """Return the predictors of a run that are not the scheduler's; ConfigError, TraceError say what lacks."""
    found: list[LookAhead] = []
    for name in state.setup.predict:
        if name in NEXT_LAYERS:
            found.append(NextLayer(state, name))
        elif name == DRAFT_GATE:
            found.append(DraftGate(state))
    return found
