"""Cache-aware: experts that are resident get a bonus before the router's top-k (Skliar et al. 2025;
SpecMD eq. 1).

z' = z + lambda * delta for resident experts; selection from z', weights from z. delta is the running mean of
the logits ("historical average logit value"). That has no scale of its own: where a model's logits are
negative on average, resident experts are put back, not forward. Lossy; needs a trace with all logits of a
softmax router. Knobs: `lambda`, 0.1 to 0.5 in the paper, and `range` = 1, which takes the running mean of the
logits' range (largest less smallest of a token) for delta instead.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np

from pyspac.lab.demand import Demand, Floats, Indices, fold
from pyspac.lab.events import Routed, RouterOutput
from pyspac.lab.policy import Routing
from pyspac.lab.registry import register
from pyspac.lab.trace import NOT_RUN


@register("cache-aware")
class CacheAware(Routing):
    """Re-selects each token's experts."""

    knobs: ClassVar[dict[str, float]] = {"lambda": 0.2, "range": 0}
    limits: ClassVar[dict[str, tuple[float, float]]] = {"lambda": (0, 1), "range": (0, 1)}
    needs_logits: ClassVar[bool] = True
    is_lossy: ClassVar[bool] = True

    def start(self) -> None:
        """Know no logits yet."""
        self.delta, self.n_seen = 0.0, 0

    def route(self, routed: Routed) -> Demand:
        """Select again, token by token."""
        router, il, n_expert = routed.router, routed.demand.il, self.view.n_expert
        assert router is not None
        z = router.logits.astype(np.float64)  # [n_token, n_expert]
        self._learn(z)
        is_resident = self.view.cache.is_resident(np.arange(il * n_expert, (il + 1) * n_expert))
        biased = z + self.knob["lambda"] * self.delta * is_resident
        chosen = np.argsort(-biased, axis=1, kind="stable")[:, : self.view.geometry.n_expert_used]
        weights = _weights(z, router, chosen)
        lost = max(float(router.weights.sum() - weights.sum()), 0.0)
        return replace(_fold(il, il * n_expert + chosen, weights), lost=lost)

    def _learn(self, z: Floats) -> None:
        """Take the layer's logits into the running mean."""
        seen = np.ptp(z, axis=1) if self.knob["range"] else z.mean(axis=1)
        self.n_seen += 1
        self.delta += (float(seen.mean()) - self.delta) / self.n_seen


def _weights(z: Floats, router: RouterOutput, chosen: Indices) -> Floats:
    """Return [n_token, n_expert_used] what the router gives the chosen, on the scale of its own choice.

    Weights are in proportion to exp(z); a stand-in's too, so that it loses only what it is worth less.
    """
    e = np.exp(z - z.max(axis=1, keepdims=True))
    wanted = router.experts.astype(np.intp)
    e_wanted = np.where(wanted == NOT_RUN, 0.0, np.take_along_axis(e, wanted, axis=1))
    scale = router.weights.sum(axis=1) / e_wanted.sum(axis=1)  # however the model normalises
    return np.asarray(np.take_along_axis(e, chosen, axis=1) * scale[:, None])


def _fold(il: int, keys: Indices, weights: Floats) -> Demand:
    """Fold [n_token, n_expert_used] choices into distinct experts, in the order of their ids."""
    order = np.argsort(keys, axis=None, kind="stable")
    rank = np.broadcast_to(np.arange(keys.shape[1]), keys.shape).ravel()
    return fold(il, keys.ravel()[order], weights.ravel()[order], rank[order])
