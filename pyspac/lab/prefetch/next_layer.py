"""Next layer: the next layer's router, applied early, names its experts (Eliseev and Mazur 2023; specmd.txt
3.1.4).

Each token's n_expert_used best are copied while the present layer runs. Knob: `overfetch`, a factor on that
number.
"""

from __future__ import annotations

from typing import ClassVar

from pyspac.lab.policy import Demand, Prefetch, register
from pyspac.lab.predictor import Predictor


@register("prefetch", "next-layer")
class NextLayer(Prefetch):
    """Copies the guess for layer il + 1."""

    knobs: ClassVar[dict[str, float]] = {"overfetch": 1.0}
    overfetch: float

    def start(self) -> None:
        """Make the predictor."""
        self.predictor = Predictor(self.run)

    def after_router(self, demand: Demand) -> None:
        """Guess and submit."""
        il = demand.il + 1
        if il < self.run.n_layer and self.run.geometry.expert_bytes[il]:
            n = round(self.overfetch * self.run.geometry.n_expert_used)
            self.run.prefetch(self.predictor.top(il, self.run.step.tokens, n))
