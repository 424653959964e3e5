"""Measures T(n) of a model: forward passes of every width in turn, at the same place of a text.

In: a `Runner` with an empty context. Out: a `Profile`. One round runs every width once, in random order,
each taken back again; then the text moves on by a few tokens and the scheduler may change the placement. So
every width meets the same contexts, placements and disturbances.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import mean
from typing import TYPE_CHECKING, Final

from pyspac.errors import ConfigError, UsageError
from pyspac.speculation.tolerance import Profile, Samples

if TYPE_CHECKING:
    from pyspac.forward.context import Context
    from pyspac.forward.runner import Runner

N_WARM_UP_STEPS: Final = 24  # one token each, for the scheduler to place experts
N_ADVANCE: Final = 3  # tokens from one round to the next
N_DRAFT: Final = 4  # tokens per drafting measurement

FREE: Final = Samples((0.0,))  # what a drafter without a model takes, beside a pass
OnRound = Callable[[int], None]  # rounds done


def layer_sums(runner: Runner) -> tuple[int, int, int]:
    """Distinct experts, their microseconds and layers computed, since the start; 0 without an engine.

    Where host and device work at once, the host's.
    """
    if runner.split is None:
        return 0, 0, 0
    board = runner.split.engine.board
    stats = board.layer_stats
    sums = {name: int(stats[name].sum()) for name in (stats.dtype.names or ())}
    experts = sums["n_device_experts"] + sums["n_host_experts"]
    device_us = sums["device_us"] if board.devices["is_in_graph"].any() else 0
    return experts, device_us + sums["host_us"], sums["n_calls"]


class Profiler:
    """One profile of one model; uses up its context."""

    def __init__(self, runner: Runner, *, width_max: int, n_rounds: int, n_prompt: int) -> None:
        """`n_prompt`: tokens in the context before the first measurement."""
        self.runner = runner
        self.widths = range(1, width_max + 1)
        self.n_rounds = n_rounds
        self.n_prompt = n_prompt
        self._verify: dict[int, list[float]] = defaultdict(list)
        self._draft_us: list[float] = []
        self._n_experts: dict[int, list[float]] = defaultdict(list)
        self._experts_share: dict[int, list[float]] = defaultdict(list)

    @property
    def n_tokens_needed(self) -> int:
        return self.n_prompt + N_WARM_UP_STEPS + N_ADVANCE * self.n_rounds + max(self.widths[-1], N_DRAFT)

    def run(self, text: Sequence[int], on_round: OnRound = lambda n: None) -> Profile:
        """Measure over `text`, repeated if it is too short."""
        tokens = self._tokens(text)
        position = self._warm_up(tokens)
        rng = random.Random(0)
        for i in range(self.n_rounds):
            for n in rng.sample(self.widths, len(self.widths)):
                self._measure(tokens[position : position + n])
            if self.runner.draft is not None:
                self._measure_draft(self.runner.draft, tokens[: position + 1])
            self._step(tokens[position : position + N_ADVANCE])
            position += N_ADVANCE
            on_round(i + 1)
        return self._profile()

    def _tokens(self, text: Sequence[int]) -> list[int]:
        if self.n_tokens_needed > self.runner.context.n_ctx:
            wanted = (
                f"{self.n_tokens_needed} or more, which {self.n_rounds} rounds after a prompt of "
                f"{self.n_prompt} tokens need"
            )
            raise ConfigError("-c", self.runner.context.n_ctx, wanted)
        if not text:
            raise UsageError("the text to measure on is empty: give a longer one with -f")
        return (list(text) * (self.n_tokens_needed // len(text) + 1))[: self.n_tokens_needed]

    def _warm_up(self, tokens: Sequence[int]) -> int:
        self.runner.context.decode(tokens[: self.n_prompt], 0)
        self.runner.after_prompt()
        for i in range(N_WARM_UP_STEPS):
            self._step(tokens[self.n_prompt + i : self.n_prompt + i + 1])
        position = self.n_prompt + N_WARM_UP_STEPS
        for n in self.widths:  # the first pass of each width sets up its graph
            self._forward(tokens[position : position + n])
        return position

    def _step(self, tokens: Sequence[int]) -> None:
        """Go on in the text, as a decoding step would."""
        self.runner.context.decode(tokens, 1)
        self.runner.after_step(len(tokens))

    def _forward(self, tokens: Sequence[int]) -> float:
        """Time one pass that gives all logits, and take it back; microseconds."""
        context = self.runner.context
        n_past = context.n_past
        start = time.perf_counter_ns()
        context.decode(tokens, len(tokens))
        us = (time.perf_counter_ns() - start) / 1e3
        context.rollback(n_past)
        self.runner.end_forward()
        return us

    def _measure(self, tokens: Sequence[int]) -> None:
        n = len(tokens)
        self._forward(tokens)  # sets up the graph of this width
        before = layer_sums(self.runner)
        us = self._forward(tokens)
        n_experts, experts_us, n_calls = (b - a for a, b in zip(before, layer_sums(self.runner), strict=True))
        self._verify[n].append(us)
        if n_calls:
            self._n_experts[n].append(n_experts / n_calls)
            if experts_us:
                self._experts_share[n].append(experts_us / us)

    def _measure_draft(self, draft: Context, tokens: Sequence[int]) -> None:
        """Drafting some tokens, the likeliest each time, after `tokens`."""
        if len(tokens) - 1 > draft.n_past:
            draft.decode(tokens[draft.n_past : -1])
        n_past, token = draft.n_past, tokens[-1]
        start = time.perf_counter_ns()
        for _ in range(N_DRAFT):
            token = int(draft.decode([token])[0].argmax())
        self._draft_us.append((time.perf_counter_ns() - start) / 1e3 / N_DRAFT)
        draft.rollback(n_past)

    def _profile(self) -> Profile:
        drafters = {"model": Samples(tuple(self._draft_us))} if self._draft_us else {}
        drafters["n-gram"] = FREE  # it looks through the text
        return Profile(
            verify={n: Samples(tuple(us)) for n, us in self._verify.items()},
            drafters=drafters,
            n_experts={n: mean(values) for n, values in self._n_experts.items()},
            experts_share={n: mean(values) for n, values in self._experts_share.items()},
        )
