"""Score percentile: copy every expert of the next layer whose early score is high (Zhu et al. 2025;
specmd.txt 3.1.4).

The number follows the scores' distribution: a layer that spreads its scores gets fewer copies. So it needs a
trace that holds the scores. Knob: `percentile` of all scores so far that a score must exceed.
"""

from __future__ import annotations

from typing import ClassVar

from pyspac.errors import ConfigError
from pyspac.lab.policy import Demand, Prefetch, register
from pyspac.lab.predictor import Predictor


@register("prefetch", "score")
class ScorePrefetch(Prefetch):
    """Copies the experts above the percentile for layer il + 1."""

    knobs: ClassVar[dict[str, float]] = {"percentile": 80.0}
    percentile: float

    def start(self) -> None:
        """Make the predictor; ConfigError if the trace holds no scores."""
        self.predictor = Predictor(self.run)
        if not self.predictor.has_scores:
            raise ConfigError(
                "--prefetch", "score", "a trace with the next layer's scores (pyspac trace --early)"
            )

    def after_router(self, demand: Demand) -> None:
        """Guess and submit."""
        il = demand.il + 1
        if il < self.run.n_layer and self.run.geometry.expert_bytes[il]:
            self.run.prefetch(self.predictor.above(il, self.run.step.tokens, self.percentile))
