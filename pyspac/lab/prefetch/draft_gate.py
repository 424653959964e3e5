"""Draft gate (SP-MoE): while the draft model runs its layer l, the target's router of layer l guesses the
experts.

Layers up to the cutoff are copied during drafting (`pyspac.lab.cutoff`), so that verification finds them. No
trace records these guesses, so they are always assumed. The paper measures how often the first choice is
right (88.94 % for DeepSeek-Lite, about 88 % for two others), of the other choices it says nothing.
Knobs: `accuracy` of the guess, for every choice alike (-1: as `--accuracy`), and `critical`, experts per
token (0: n_expert_used).
"""

from __future__ import annotations

from typing import ClassVar

from pyspac.lab.cutoff import cutoff_layer
from pyspac.lab.policy import Prefetch, register
from pyspac.lab.predictor import Predictor


@register("prefetch", "draft-gate")
class DraftGate(Prefetch):
    """Submits guesses at the time when the draft would make them."""

    knobs: ClassVar[dict[str, float]] = {"accuracy": -1, "critical": 0}
    accuracy: float
    critical: float

    def start(self) -> None:
        """Solve for the cutoff layer; the draft has the target's layers, as SP-MoE requires."""
        run = self.run
        self.n_critical = int(self.critical) or run.geometry.n_expert_used
        accuracy = self.accuracy if self.accuracy >= 0 else None
        self.predictor = Predictor(run, accuracy=accuracy, can_use_record=False)
        self.layer_us = run.machine.draft_us / run.n_layer
        self.cutoff = cutoff_layer(
            [self.n_critical] * run.n_layer,
            layer_us=self.layer_us,
            copy_us=run.machine.copy_us(run.cache.bytes_of.max()),
            n_draft=run.k,
            n_layer_draft=run.n_layer,
            n_experts_room=sum(run.group_slots),
        )

    def begin_step(self) -> None:
        """Submit token by token and layer by layer while drafting."""
        run = self.run
        for i in range(run.step.n_draft):
            for il in range(self.cutoff):
                now = run.now + i * run.machine.draft_us + (il + 1) * self.layer_us
                guess = self.predictor.top(il, run.step.tokens[i : i + 1], self.n_critical)
                run.link.submit([(int(key), 1) for key in guess], now)
