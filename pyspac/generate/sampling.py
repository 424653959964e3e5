"""From logits to tokens: greedy or sampled, and the verification of drafted tokens.

In: logits [n, n_vocab] float32 and drafted tokens. Out: the tokens to emit. Verification keeps the output's
distribution exactly: a drafted token x, drawn from q, is accepted with probability min(1, p(x) / q(x)); after
a rejection the token is drawn from the residual max(0, p - q), normalised (Leviathan et al., 2023, "Fast
inference from transformers via speculative decoding"). The filters are llama.cpp's, in its order: top-k,
top-p, min-p, temperature.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pyspac.checks import check_int, check_range
from pyspac.errors import PyspacError

Probs = npt.NDArray[np.float64]  # [n_vocab] or [n, n_vocab]; sums to 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The names and meanings of llama.cpp; `temp` 0 is greedy, `top_k` 0 and `top_p` 1 are off."""

    temp: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int = -1  # -1: random

    def __post_init__(self) -> None:
        check_range("--temp", self.temp, 0.0, 100.0)
        check_int("--top-k", self.top_k, 0, 2**31 - 1)
        check_range("--top-p", self.top_p, 0.0, 1.0)
        check_range("--min-p", self.min_p, 0.0, 1.0)
        check_int("--seed", self.seed, -1, 2**63 - 1)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The tokens a step emits: the accepted drafts and one of the target's own."""

    tokens: list[int]

    @property
    def n_accepted(self) -> int:
        return len(self.tokens) - 1


class Sampler:
    """Draws tokens; one random stream per sampler, so a run repeats with its seed."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.seed = params.seed if params.seed >= 0 else secrets.randbits(32)
        self.rng = np.random.default_rng(self.seed)

    @property
    def is_greedy(self) -> bool:
        return self.params.temp == 0.0

    def sample(self, logits: npt.NDArray[np.float32]) -> tuple[int, Probs | None]:
        """One token from `logits` [n_vocab], and the distribution it came from (None: greedy)."""
        if self.is_greedy:
            return argmax(logits), None
        probs = self.probs(logits)
        return self.draw(probs), probs

    def probs(self, logits: npt.NDArray[np.float32]) -> Probs:
        """The distribution [n_vocab] that is sampled from; float64, zero where filtered out."""
        params = self.params
        if not np.isfinite(best := logits.max()):
            raise _not_finite(float(best))
        ids = _top_k(logits, params.top_k)  # best first
        x = logits[ids].astype(np.float64)
        weights = np.exp(x - x[0])
        n_keep = min(_n_top_p(weights, params.top_p), _n_min_p(weights, params.min_p))
        weights = np.exp((x[:n_keep] - x[0]) / params.temp) if params.temp else np.ones(1)
        result = np.zeros(logits.shape[-1], dtype=np.float64)
        result[ids[: len(weights)]] = weights / weights.sum()
        return result

    def draw(self, probs: Probs) -> int:
        """One token id from `probs` [n_vocab]; they need not be normalised."""
        ids = np.flatnonzero(probs)
        cumulative = np.cumsum(probs[ids])
        i = np.searchsorted(cumulative, self.rng.random() * cumulative[-1], side="right")
        return int(ids[min(i, len(ids) - 1)])

    def verify(
        self, logits: npt.NDArray[np.float32], drafted: Sequence[int], draft_probs: Sequence[Probs] | None
    ) -> Verdict:
        """What to emit, given the target's `logits` [1 + n_draft, n_vocab] after the last token and each.

        `draft_probs`: the distributions the drafts were drawn from; None: the drafter is deterministic.
        """
        assert len(logits) == len(drafted) + 1
        tokens: list[int] = []
        for i, token in enumerate(drafted):
            chosen = self._verify_one(logits[i], token, None if draft_probs is None else draft_probs[i])
            tokens.append(chosen)
            if chosen != token:
                return Verdict(tokens)
        tokens.append(self.sample(logits[-1])[0])
        return Verdict(tokens)

    def _verify_one(self, logits: npt.NDArray[np.float32], token: int, q: Probs | None) -> int:
        """`token` if it is accepted, else another one (never `token`)."""
        if self.is_greedy:
            return argmax(logits)
        p = self.probs(logits)
        q_token = 1.0 if q is None else q[token]
        assert q_token > 0, "a drafted token must come from its own distribution"
        if self.rng.random() * q_token < p[token]:
            return token
        return self.draw(residual(p, token, q))


def residual(p: Probs, token: int, q: Probs | None) -> Probs:
    """max(0, p - q), not normalised; with q None all of q is on `token`."""
    rest = p.copy() if q is None else np.maximum(p - q, 0.0)
    rest[token] = 0.0  # rejected, so p(token) < q(token): exactly zero but for rounding
    return rest if rest.any() else np.where(np.arange(len(p)) == token, 0.0, p)


def argmax(logits: npt.NDArray[np.float32]) -> int:
    """The greedy choice: the lowest id among equal maxima. Raises PyspacError for NaN."""
    token = int(np.argmax(logits))
    if np.isnan(logits[token]):
        raise _not_finite(float(logits[token]))
    return token


def _not_finite(value: float) -> PyspacError:
    return PyspacError(
        f"the model computed {value} instead of logits; the file is damaged, or its quantisation does not "
        "suit this device: check the file, or try another --device"
    )


def _top_k(logits: npt.NDArray[np.float32], k: int) -> npt.NDArray[np.intp]:
    """Ids of the `k` largest logits, best first, lowest id first among equals; k = 0: all."""
    if 0 < k < len(logits):
        threshold = np.partition(logits, len(logits) - k)[len(logits) - k]
        ids = np.flatnonzero(logits >= threshold)
    else:
        ids = np.arange(len(logits))
    order = np.argsort(-logits[ids], kind="stable")
    return ids[order][: k or None]


def _n_top_p(weights: Probs, top_p: float) -> int:
    """How many of the sorted `weights` are needed to reach the share `top_p`; at least one."""
    if top_p >= 1.0:
        return len(weights)
    cumulative = np.cumsum(weights)
    return int(np.searchsorted(cumulative, top_p * cumulative[-1], side="left")) + 1


def _n_min_p(weights: Probs, min_p: float) -> int:
    """How many of the sorted `weights` are at least `min_p` of the largest, which is 1; at least one."""
    return max(1, int(np.count_nonzero(weights >= min_p)))
