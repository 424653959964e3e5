"""Score percentile: copy every expert of the next layer whose early score is high (Zhu et al. 2025;
SpecMD 3.1.4).

The number follows the scores' distribution: a layer that spreads its scores gets fewer copies. So it needs a
trace that holds the scores. Knob: `percentile` of all scores so far that a score must exceed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from pyspac.errors import ConfigError
from pyspac.lab.events import Access
from pyspac.lab.policy import Copies, Prefetch
from pyspac.lab.predict.predictor import Predictor
from pyspac.lab.predict.recorded import best_first
from pyspac.lab.registry import register


@register("score")
class ScorePrefetch(Prefetch):
    """Copies the experts above the percentile for layer il + 1."""

    knobs: ClassVar[dict[str, float]] = {"percentile": 80.0}
    limits: ClassVar[dict[str, tuple[float, float]]] = {"percentile": (0, 100)}
    predictor: Predictor

    def start(self) -> None:
        """Find out who guesses; ConfigError if the trace holds no scores."""
        self.predictor = self.view.predictor("next-layer")
        if not self.predictor.has_scores:
            raise ConfigError(
                "--prefetch", "score", "a trace with the next layer's scores (pyspac trace --early)"
            )
        self.threshold = 0.0  # running mean of the percentile over layers
        self.n_seen = 0

    def after_router(self, access: Access) -> Iterator[Copies]:
        """Copy what any token's score puts above the threshold."""
        il, g = access.demand.il + 1, self.view.geometry
        if il < g.n_layer and g.expert_bytes[il]:
            probs = self.predictor.scores(il, access.tokens)
            self.n_seen += 1
            seen = float(np.percentile(probs, self.knob["percentile"]))
            self.threshold += (seen - self.threshold) / self.n_seen
            chosen = np.flatnonzero((probs > self.threshold).any(axis=0))
            yield Copies(il * g.n_expert + best_first(probs, chosen))
