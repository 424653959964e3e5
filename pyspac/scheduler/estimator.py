"""Step 2: activation counts of one step in, a utility 0 .. n_levels per expert out.

Every estimator writes its levels into `utility` in place, and costs O(n_layer * n_expert) per step. Levels
mean the same in every layer: the engine compares them across layers when it picks a victim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pyspac.scheduler.config import SchedulerConfig

Counts = NDArray[Any]  # [n_layer, n_expert] activations of one step, any unsigned or signed integer type
Levels = NDArray[np.uint8]  # [n_layer, n_expert]


class Estimator:
    """Base of all estimators: holds the levels, `update` renews them.

    `LEARNED` names the attributes that updates have taught: arrays, or whole and real numbers. Settings, what
    follows from them, and scratch memory are not among them, so that a state that was kept overrides none.
    """

    LEARNED: ClassVar[tuple[str, ...]] = ("utility",)

    def __init__(self, n_layer: int, n_expert: int, config: SchedulerConfig) -> None:
        """Start with every expert at level 0."""
        self.shape = (n_layer, n_expert)
        self.n_levels = config.effective_levels
        self.utility: Levels = np.zeros(self.shape, np.uint8)

    def update(self, counts: Counts, n_tokens: int) -> Levels:
        """Take in one step's counts over n_tokens tokens; return `utility`, the same array every time."""
        raise NotImplementedError

    def update_but(self, counts: Counts, n_tokens: int, is_still: NDArray[np.bool_]) -> Levels:
        """Take in a step in which some layers [n_layer] were not counted: what is known of them stays."""
        learned = [getattr(self, name) for name in self._learned()]
        kept = [array[is_still] for array in learned if np.shape(array) == self.shape]
        self.update(counts, n_tokens)
        learned = [getattr(self, name) for name in self._learned()]
        for array, rows in zip((a for a in learned if np.shape(a) == self.shape), kept, strict=True):
            array[is_still] = rows
        return self.utility

    def learn_prompt(self, counts: Counts, n_tokens: NDArray[np.int64]) -> None:
        """Take in what a prompt used, where the rule has a place for it: most are for steps.

        counts: [n_layer, n_expert] activations; n_tokens: [n_layer] tokens that ran each layer, 0 or more.
        """

    def state(self) -> dict[str, NDArray[Any]]:
        """Return copies of what was learned, by name; numbers have the shape ()."""
        return {name.lstrip("_"): np.array(getattr(self, name)) for name in self._learned()}

    def restore(self, state: dict[str, NDArray[Any]]) -> bool:
        """Go on from another estimator's `state()`.

        Return False, with nothing changed, if that one was of another kind, geometry or number of levels, or
        holds what is no number.
        """
        fits = self._fits(state)
        if fits:
            for name in self._learned():
                self._put(name, state[name.lstrip("_")])
        return fits

    def averaged(self, state: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Return `state()` averaged with another estimator's: what both have learned, each by half.

        One that does not fit, as of `restore`, is left out. Whole numbers are rounded.
        """
        own = self.state()
        if not self._fits(state):
            return own
        mean = {name: (own[name].astype(np.float64) + state[name]) / 2 for name in own}
        return {
            name: (np.rint(mean[name]) if value.dtype.kind in "iu" else mean[name]).astype(value.dtype)
            for name, value in own.items()
        }

    def _fits(self, state: dict[str, NDArray[Any]]) -> bool:
        own = self.state()
        return (
            own.keys() == state.keys()
            and all(own[name].shape == state[name].shape for name in own)
            and all(own[name].dtype == state[name].dtype for name in own)
            and int(state["utility"].max(initial=0)) <= self.n_levels
            and all(bool(np.isfinite(array).all()) for array in state.values())
        )

    def _learned(self) -> tuple[str, ...]:
        return self.LEARNED

    def _put(self, name: str, value: NDArray[Any]) -> None:
        """Fill an array in place, as `utility` is handed out; set a number."""
        if value.ndim:
            np.copyto(getattr(self, name), value)
        else:
            setattr(self, name, value.item())


class SpacEstimator(Estimator):
    """Speculative utility (MoE-SpAc, Algorithm 1): a level moves by one when the count's change is large.

    Knobs: n_levels [K], forgetting [lambda], n_draft_max [gamma; `SchedulerConfig.gamma` says how]. Published
    rule, kept to the letter: since the boundary becomes floor((1 - lambda) * boundary + lambda * |d|), it
    falls by one whenever 0 < |d| < boundary, and with lambda = 0.1 it rises only if |d| >= boundary + 10. So
    it ratchets down to 1 and stays there. An expert that is always busy (d = 0) does not rise.
    """

    LEARNED: ClassVar[tuple[str, ...]] = ("utility", "_before", "up", "down")
    # lambda in units of 1 / 10000, so that floor() is exact
    _UNIT = 10_000

    def __init__(self, n_layer: int, n_expert: int, config: SchedulerConfig) -> None:
        super().__init__(n_layer, n_expert, config)
        self.is_fixed = "adabc" in config.without
        start = config.gamma // 2
        self.up = np.full(self.shape, 3 if self.is_fixed else start, np.int32)
        self.down = np.full(self.shape, 1 if self.is_fixed else start, np.int32)
        self._lambda = round(config.forgetting * self._UNIT)
        self._before = np.zeros(self.shape, np.int32)  # [f_(t-1)]

    def update(self, counts: Counts, n_tokens: int) -> Levels:
        """Move levels by the old boundaries, then the boundaries."""
        change = counts.astype(np.int32) - self._before  # [d]
        self._before[:] = counts
        is_up = change >= self.up
        is_down = ~is_up & (-change >= self.down)
        level = self.utility.astype(np.int32) + is_up - is_down
        self.utility[:] = np.clip(level, 0, self.n_levels)
        if not self.is_fixed:
            self._move_boundary(self.up, change)
            self._move_boundary(self.down, -change)
        return self.utility

    def _learned(self) -> tuple[str, ...]:
        """Boundaries that are fixed are a setting."""
        return tuple(name for name in self.LEARNED if not (self.is_fixed and name in ("up", "down")))

    def _move_boundary(self, boundary: NDArray[np.int32], change: NDArray[np.int32]) -> None:
        """Where the change is positive: boundary = floor((1 - lambda) * boundary + lambda * change)."""
        moved = ((self._UNIT - self._lambda) * boundary + self._lambda * change) // self._UNIT
        boundary[:] = np.where(change > 0, moved, boundary)


class _RateEstimator(Estimator):
    """Levels from a rate per token, 0 .. 1, on a square-root scale: fine where most experts are, near 0."""

    LEARNED: ClassVar[tuple[str, ...]] = ("utility", "_sum", "_n_tokens")
    _NOTHING = np.float32(1e-12)  # sums below are 0: long before they become denormal, which is slow
    _EVERY = 256  # updates between looks for those

    def __init__(self, n_layer: int, n_expert: int, config: SchedulerConfig) -> None:
        super().__init__(n_layer, n_expert, config)
        self._sum = np.zeros(self.shape, np.float32)  # activations, decayed
        self._n_tokens = 0.0  # tokens, decayed in the same way
        self._n_updates = 0

    def _add(self, counts: Counts, n_tokens: int, decay: float) -> None:
        self._sum[:] = decay * self._sum + counts.astype(np.float32)
        self._n_tokens = decay * self._n_tokens + n_tokens
        self._n_updates += 1
        if self._n_updates % self._EVERY == 0:
            self._sum[self._sum < self._NOTHING] = 0.0

    def _blend(
        self, counts: Counts, n_tokens: NDArray[np.int64], weight: NDArray[Any], kept: NDArray[Any]
    ) -> None:
        """Take in a prompt as if it were `weight` [n_layer] tokens; `kept` [n_layer] of the past is left.

        By layer, as the last one of a prompt runs only for the tokens whose logits are wanted.
        """
        after = np.maximum(kept * self._n_tokens + weight, 1e-9)
        n_after = float(after[n_tokens.argmax()])
        old, new = kept * n_after / after, weight * n_after / (after * np.maximum(n_tokens, 1))
        self._sum[:] = old[:, None] * self._sum + new[:, None] * counts
        self._n_tokens = n_after

    def _quantise(self) -> Levels:
        """Return round(n_levels * sqrt(rate))."""
        scale = self.n_levels**2 / max(self._n_tokens, 1e-9)
        self.utility[:] = np.minimum(np.sqrt(scale * self._sum) + 0.5, self.n_levels)
        return self.utility


class EmaEstimator(_RateEstimator):
    """Share of recent tokens that picked the expert: an exponential average of counts per token.

    Knob: ema_decay, per token, so that a step of 9 tokens counts as 9 steps of one. Starts as the plain mean.
    """

    # what a prompt counts for at most, in tokens: its order is worth having, but what follows is other text
    _PROMPT_WEIGHT = 8

    def __init__(self, n_layer: int, n_expert: int, config: SchedulerConfig) -> None:
        super().__init__(n_layer, n_expert, config)
        self.decay = config.ema_decay
        self.memory = config.memory_tokens

    def update(self, counts: Counts, n_tokens: int) -> Levels:
        """Forget as many tokens' worth as came in, then add."""
        self._add(counts, n_tokens, self.decay**n_tokens)
        return self._quantise()

    def learn_prompt(self, counts: Counts, n_tokens: NDArray[np.int64]) -> None:
        """Blend a prompt in: it makes the past fade as any tokens do, and weighs as a few of them.

        So what other requests taught is still more than half of the estimate, however long the prompt is.
        """
        kept = self.decay ** np.minimum(n_tokens, self.memory)
        self._blend(counts, n_tokens, np.minimum(n_tokens, self._PROMPT_WEIGHT), kept)
        self._quantise()


class LfuEstimator(_RateEstimator):
    """Share of all tokens so far that picked the expert (least frequently used leaves). No knob."""

    def update(self, counts: Counts, n_tokens: int) -> Levels:
        """Add; nothing is forgotten."""
        self._add(counts, n_tokens, 1.0)
        return self._quantise()

    def learn_prompt(self, counts: Counts, n_tokens: NDArray[np.int64]) -> None:
        """Add, token by token."""
        self._blend(counts, n_tokens, n_tokens, np.ones(len(n_tokens)))
        self._quantise()


class StaticEstimator(LfuEstimator):
    """As LFU for the first static_steps steps, then frozen: a fixed allocation learned at the start."""

    LEARNED: ClassVar[tuple[str, ...]] = (*LfuEstimator.LEARNED, "_n_steps")

    def __init__(self, n_layer: int, n_expert: int, config: SchedulerConfig) -> None:
        super().__init__(n_layer, n_expert, config)
        self.n_steps_max = config.static_steps
        self._n_steps = 0  # that it has learned from

    def update(self, counts: Counts, n_tokens: int) -> Levels:
        """Learn until the steps are used up."""
        if self._n_steps >= self.n_steps_max:
            return self.utility
        self._n_steps += 1
        return super().update(counts, n_tokens)

    def learn_prompt(self, counts: Counts, n_tokens: NDArray[np.int64]) -> None:
        """Learn until the steps are used up; a prompt is none of them."""
        if self._n_steps < self.n_steps_max:
            super().learn_prompt(counts, n_tokens)


class LruEstimator(Estimator):
    """Recency: n_levels for an expert used in this step, one less for every step without use. No knob."""

    def update(self, counts: Counts, n_tokens: int) -> Levels:
        """Age all by one level, then lift those in use."""
        self.utility -= self.utility > 0
        self.utility[counts > 0] = self.n_levels
        return self.utility


class LastEstimator(Estimator):
    """The last step's counts, capped at n_levels; with n_levels = 1, used or not. No knob."""

    def update(self, counts: Counts, n_tokens: int) -> Levels:
        """Copy the counts."""
        self.utility[:] = np.minimum(counts, self.n_levels)
        return self.utility


REGISTRY: dict[str, Callable[[int, int, SchedulerConfig], Estimator]] = {
    "ema": EmaEstimator,
    "spac": SpacEstimator,
    "lru": LruEstimator,
    "lfu": LfuEstimator,
    "last": LastEstimator,
    "static": StaticEstimator,
}


def make_estimator(n_layer: int, n_expert: int, config: SchedulerConfig) -> Estimator:
    """Return the estimator that config names.

    The ablation `specue` leaves binary utility: Algorithm 1 with K = 1 for `spac`, used in the last step
    otherwise.
    """
    if "specue" in config.without and config.estimator != "spac":
        return LastEstimator(n_layer, n_expert, config)
    return REGISTRY[config.estimator](n_layer, n_expert, config)
