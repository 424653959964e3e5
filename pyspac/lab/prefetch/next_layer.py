"""Next layer: the next layer's router, applied early, names its experts (Eliseev and Mazur 2023; SpecMD
3.1.4).

Each token's n_expert_used best are copied while the present layer runs. Knob: `overfetch`, a factor on that
number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pyspac.lab.events import Access
from pyspac.lab.policy import Copies, Prefetch
from pyspac.lab.predict.predictor import Predictor
from pyspac.lab.registry import register


@register("next-layer")
class NextLayer(Prefetch):
    """Copies the guess for layer il + 1."""

    knobs: ClassVar[dict[str, float]] = {"overfetch": 1.0}
    limits: ClassVar[dict[str, tuple[float, float]]] = {"overfetch": (0, 1e4)}
    predictor: Predictor

    def start(self) -> None:
        """Find out who guesses."""
        self.predictor = self.view.predictor("next-layer")

    def after_router(self, access: Access) -> Iterator[Copies]:
        """Copy what the next layer's tokens are guessed to want."""
        il, g = access.demand.il + 1, self.view.geometry
        if il < g.n_layer and g.expert_bytes[il]:
            n = round(self.knob["overfetch"] * g.n_expert_used)
            yield Copies(self.predictor.top(il, access.tokens, n))
