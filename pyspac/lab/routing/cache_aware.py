"""Cache-aware: experts that are resident get a bonus before the router's top-k (Skliar et al. 2025;
specmd.txt eq. 1).

z' = z + lambda * delta for resident experts; selection from z', weights from z. delta is the running mean of
the logits ("historical average logit value"). That has no scale of its own: where a model's logits are
negative on average, resident experts are put back, not forward. Lossy; needs a trace with all logits of a
softmax router. Knobs: `lambda`, 0.1 to 0.5 in the paper, and `range` = 1, which takes the running mean of the
logits' range (largest less smallest of a token) for delta instead.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from pyspac.errors import ConfigError, UsageError
from pyspac.lab.policy import NEVER, Demand, Floats, Routing, register
from pyspac.lab.trace import NOT_RUN


@register("routing", "cache-aware")
class CacheAware(Routing):
    """Re-selects each token's experts."""

    knobs: ClassVar[dict[str, float]] = {"lambda": 0.2, "range": 0}
    range: float

    def start(self) -> None:
        """Refuse traces without logits, and policies that know the future of another routing."""
        if self.run.trace.logits is None:
            raise ConfigError(
                "--routing", "cache-aware", "a trace with router logits (pyspac trace --logits)"
            )
        if self.run.eviction.may_bypass:
            raise UsageError(
                "--routing cache-aware cannot go with belady, which knows the future of standard routing: "
                "choose another --eviction"
            )
        self.bonus = float(getattr(self, "lambda"))
        self.delta, self.n_seen = 0.0, 0

    def route(self, demand: Demand) -> Demand:
        """Select again, token by token."""
        run = self.run
        assert run.trace.logits is not None
        first = demand.il * run.n_expert
        tokens = run.step.tokens[run.trace.experts[run.step.tokens, demand.il, 0] != NOT_RUN]
        z = run.trace.logits[tokens, demand.il].astype(np.float64)  # [n_token, n_expert]
        self.n_seen += 1
        seen = np.ptp(z, axis=1) if self.range else z.mean(axis=1)
        self.delta += (float(seen.mean()) - self.delta) / self.n_seen
        is_resident = run.cache.is_resident(np.arange(first, first + run.n_expert))
        biased = z + self.bonus * self.delta * is_resident
        chosen = np.argsort(-biased, axis=1, kind="stable")[:, : run.geometry.n_expert_used]
        own = self._weights(z, tokens, demand.il, chosen)
        lost = max(float(run.trace.weights[tokens, demand.il].sum() - own.sum()), 0.0)
        return _fold(demand.il, first + chosen, own, lost)

    def _weights(
        self, z: Floats, tokens: npt.NDArray[np.intp], il: int, chosen: npt.NDArray[np.intp]
    ) -> Floats:
        """Return [n_token, n_expert_used] what the router gives the chosen, on the scale of its own choice.

        Weights are in proportion to exp(z); a stand-in's too, so that it loses only what it is worth less.
        """
        trace = self.run.trace
        e = np.exp(z - z.max(axis=1, keepdims=True))
        wanted = trace.experts[tokens, il].astype(np.intp)
        e_wanted = np.where(wanted == NOT_RUN, 0.0, np.take_along_axis(e, wanted, axis=1))
        scale = trace.weights[tokens, il].sum(axis=1) / e_wanted.sum(axis=1)  # however the model normalises
        return np.asarray(np.take_along_axis(e, chosen, axis=1) * scale[:, None])


def _fold(il: int, chosen: npt.NDArray[np.intp], weights: Floats, lost: float) -> Demand:
    """Fold (token, rank) pairs into distinct experts, in their order."""
    keys, inverse = np.unique(chosen.ravel(), return_inverse=True)
    n = len(keys)
    rank = np.full(n, 2**31, np.int64)
    np.minimum.at(rank, inverse, np.broadcast_to(np.arange(chosen.shape[1]), chosen.shape).ravel())
    return Demand(
        il, keys, np.bincount(inverse, minlength=n).astype(np.int64),
        np.bincount(inverse, weights.ravel(), n).astype(np.float64), rank, np.full(n, NEVER, np.int64),
        lost=lost,
    )  # fmt: skip
