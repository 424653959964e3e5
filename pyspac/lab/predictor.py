"""Which experts a layer will want, guessed before its router runs.

A trace recorded with the next layer's router applied early holds real guesses. For other traces a guess of
assumed accuracy is made from the truth: each of a token's experts is in the guess with that probability,
whatever its rank, and random experts fill the rest; a guess of n * n_expert_used experts finds each with
1 - (1 - accuracy)^n. What rests on such a guess is reported as `assumed`. Scores are not made up: a policy
that needs them needs a trace that holds them.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from pyspac.lab.demand import Keys
from pyspac.lab.state import RunState
from pyspac.lab.trace import NOT_RUN

ASSUMED: Final = "assumed"


class Predictor:
    """Guesses for tokens of the trace; seeded, so that a run repeats."""

    def __init__(self, run: RunState, *, accuracy: float | None = None, can_use_record: bool = True) -> None:
        """Take the recorded guesses if there are any and they may be used."""
        self.trace = run.trace
        self.n_expert, self.n_expert_used = run.n_expert, run.geometry.n_expert_used
        self.accuracy = run.setup.predictor_accuracy if accuracy is None else accuracy
        self.early = self.trace.early_logits if can_use_record else None
        self.rng = np.random.default_rng(run.setup.seed)
        self._threshold = 0.0  # running mean of the percentile over layers
        self._n_seen = 0

    @property
    def source(self) -> str:
        """Say where guesses come from, for reports."""
        return "recorded" if self.has_scores else f"{ASSUMED} {self.accuracy:g}"

    @property
    def has_scores(self) -> bool:
        """Whether the guesses are recorded, scores and all."""
        return self.early is not None

    def top(self, il: int, tokens: npt.NDArray[np.intp], n: int) -> Keys:
        """Return the union of n experts per token, those guessed with most confidence first."""
        n = min(max(n, 1), self.n_expert)
        if self.early is None:
            return self._assumed(il, tokens, n)
        probs = self._probs(il, tokens)
        best = np.argsort(-probs, axis=1, kind="stable")[:, :n]
        return self._ordered(il, probs, np.unique(best))

    def above(self, il: int, tokens: npt.NDArray[np.intp], percentile: float) -> Keys:
        """Return the experts whose recorded score is above the usual percentile of all scores so far."""
        probs = self._probs(il, tokens)
        self._n_seen += 1
        self._threshold += (float(np.percentile(probs, percentile)) - self._threshold) / self._n_seen
        return self._ordered(il, probs, np.flatnonzero((probs > self._threshold).any(axis=0)))

    def _probs(self, il: int, tokens: npt.NDArray[np.intp]) -> npt.NDArray[np.float64]:
        assert self.early is not None
        z = self.early[tokens, il].astype(np.float64)  # [n_token, n_expert]
        z = z[np.isfinite(z).all(axis=1)]
        e = np.exp(z - z.max(axis=1, keepdims=True)) if len(z) else np.zeros((1, self.n_expert))
        return np.asarray(e / np.maximum(e.sum(axis=1, keepdims=True), 1e-12))

    def _ordered(self, il: int, probs: npt.NDArray[np.float64], experts: npt.NDArray[np.intp]) -> Keys:
        order = np.argsort(-probs[:, experts].max(axis=0), kind="stable")
        return np.asarray(il * self.n_expert + experts[order])

    def _assumed(self, il: int, tokens: npt.NDArray[np.intp], n: int) -> Keys:
        truth = self.trace.experts[tokens, il]
        truth = truth[truth[:, 0] != NOT_RUN][:, :n]
        factor = max(n / self.n_expert_used, 1.0)
        recall = 1.0 - (1.0 - self.accuracy) ** factor
        found = truth[self.rng.random(truth.shape) < recall]
        n_wrong = len(truth) * n - len(found)
        wrong = self.rng.integers(0, self.n_expert, n_wrong)
        both = np.concatenate([found.astype(np.intp), wrong])
        _, first = np.unique(both, return_index=True)
        return np.asarray(il * self.n_expert + both[np.sort(first)], np.intp)
