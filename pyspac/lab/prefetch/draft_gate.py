"""Draft gate (SP-MoE): while the draft model runs its layer l, the target's router of layer l guesses the
experts.

Layers up to the cutoff are copied during drafting (`pyspac.lab.cutoff`), so that verification finds them.
The guesses are those that the trace recorded, else assumed; `--predict draft-gate` replays the engine's own
use of them. The paper measures how often the first choice is right (88.94 % for DeepSeek-Lite, about 88 % for
two others), of the other choices it says nothing. Knobs: `cutoff`, layers (-1: solved for), `critical`,
experts per token (0: n_expert_used), and `accuracy` of assumed guesses, for every choice alike (-1: as
`--accuracy`; any other value: assumed even where the trace has recorded ones).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pyspac.lab.cutoff import cutoff_layer
from pyspac.lab.events import StepBegun
from pyspac.lab.policy import Copies, Prefetch
from pyspac.lab.predict.predictor import Predictor
from pyspac.lab.registry import register


@register("draft-gate")
class DraftGate(Prefetch):
    """Asks for the guesses at the time when the draft would make them."""

    knobs: ClassVar[dict[str, float]] = {"accuracy": -1.0, "critical": 0, "cutoff": -1}
    limits: ClassVar[dict[str, tuple[float, float]]] = {
        "accuracy": (-1, 1), "critical": (0, 1e4), "cutoff": (-1, 1e4),
    }  # fmt: skip
    predictor: Predictor

    def start(self) -> None:
        """Solve for the cutoff layer; the draft has the target's layers, as SP-MoE requires."""
        view = self.view
        self.n_critical = int(self.knob["critical"]) or view.geometry.n_expert_used
        accuracy = self.knob["accuracy"] if self.knob["accuracy"] >= 0 else None
        self.predictor = view.predictor("draft-gate", accuracy)
        self.layer_us = view.machine.draft_us / view.n_layer
        self.cutoff = min(int(self.knob["cutoff"]), view.n_layer)
        if self.cutoff < 0:
            self.cutoff = self._solve()

    def _solve(self) -> int:
        view = self.view
        return cutoff_layer(
            [self.n_critical] * view.n_layer,
            layer_us=self.layer_us,
            copy_us=view.machine.copy_us(view.cache.bytes_of.max()),
            n_draft=view.k,
            n_layer_draft=view.n_layer,
            n_experts_room=sum(view.cache.group_slots),
        )

    def while_drafting(self, event: StepBegun) -> Iterator[Copies]:
        """Guess token by token and layer by layer."""
        for i in range(event.n_draft):
            for il in range(self.cutoff):
                at_us = self.view.now_us + i * self.view.machine.draft_us + (il + 1) * self.layer_us
                guess = self.predictor.top(il, event.tokens[i : i + 1], self.n_critical)
                yield Copies(guess, at_us=at_us)
