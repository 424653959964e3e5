"""Cache-aware: experts that are resident get a bonus before the router's top-k (Skliar et al. 2025;
specmd.txt eq. 1).

z' = z + lambda * delta for resident experts; selection from z', weights from z. delta is the running mean
of the logits' range (SpecMD says "average logit value", which has no scale of its own). Lossy; needs a
trace with all logits. Knob: `lambda`, 0.1 to 0.5 in the paper.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from pyspac.errors import ConfigError
from pyspac.lab.policy import NEVER, Demand, Routing, register
from pyspac.trace import NOT_RUN


@register("routing", "cache-aware")
class CacheAware(Routing):
    """Re-selects each token's experts."""

    knobs: ClassVar[dict[str, float]] = {"lambda": 0.2}

    def start(self) -> None:
        """Refuse traces without logits, and policies that know the future of another routing."""
        if self.run.trace.logits is None:
            raise ConfigError(
                "--routing", "cache-aware", "a trace with router logits (pyspac trace --logits)"
            )
        if self.run.eviction.may_bypass:
            raise ConfigError(
                "--routing", "cache-aware", "not with belady: it knows the future of standard routing"
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
        self.delta += (float(np.ptp(z, axis=1).mean()) - self.delta) / self.n_seen
        is_resident = run.cache.is_resident(np.arange(first, first + run.n_expert))
        biased = z + self.bonus * self.delta * is_resident
        chosen = np.argsort(-biased, axis=1, kind="stable")[:, : run.geometry.n_expert_used]
        return self._demand(demand, tokens, chosen, first)

    def _demand(
        self, demand: Demand, tokens: npt.NDArray[np.intp], chosen: npt.NDArray[np.intp], first: int
    ) -> Demand:
        trace = self.run.trace
        wanted, weights = trace.experts[tokens, demand.il], trace.weights[tokens, demand.il]
        same = chosen[:, :, None] == wanted[:, None, :]  # [n_token, chosen, wanted]
        kept = np.einsum("tcw,tw->tc", same, weights)  # the router's weight; 0 for a stand-in
        keys, inverse = np.unique(first + chosen.ravel(), return_inverse=True)
        n = len(keys)
        rank = np.full(n, 2**31, np.int64)
        np.minimum.at(rank, inverse, np.broadcast_to(np.arange(chosen.shape[1]), chosen.shape).ravel())
        return Demand(
            demand.il, keys, np.bincount(inverse, minlength=n).astype(np.int64),
            np.bincount(inverse, kept.ravel(), n).astype(np.float64), rank, np.full(n, NEVER, np.int64),
            lost=float(weights.sum() - kept.sum()),
        )  # fmt: skip
