"""Measures T(n) of a session: forward passes of every width in turn, at the same place of a text.

In: a session that is ready to generate. Out: a `Profile`. One round runs every width once, in random order,
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

from pyspac.engine.step import StepRecord
from pyspac.errors import ConfigError, UsageError
from pyspac.generate.drafting import Drafter
from pyspac.generate.ngram_drafter import NgramDrafter
from pyspac.speculation.tolerance import Profile, Samples

if TYPE_CHECKING:
    from pyspac.generate.session import Session
    from pyspac.generate.split import Split

N_WARM_UP_STEPS: Final = 24  # one token each, for the scheduler to place experts
N_ADVANCE: Final = 3  # tokens from one round to the next
N_DRAFT: Final = 4  # tokens per drafting measurement

OnRound = Callable[[int], None]  # rounds done


def layer_sums(split: Split | None) -> tuple[int, int, int]:
    """Distinct experts, their microseconds and layers computed, since the start; 0 without an engine."""
    if split is None:
        return 0, 0, 0
    stats = split.engine.board.layer_stats
    sums = {name: int(stats[name].sum()) for name in (stats.dtype.names or ())}
    experts = sums["n_device_experts"] + sums["n_host_experts"]
    return experts, sums["device_us"] + sums["host_us"], sums["n_calls"]


class Profiler:
    """One profile of one session; uses up its context."""

    def __init__(self, session: Session, *, width_max: int, n_rounds: int, n_prompt: int) -> None:
        """`n_prompt`: tokens in the context before the first measurement."""
        self.session = session
        self.widths = range(1, width_max + 1)
        self.n_rounds = n_rounds
        self.n_prompt = n_prompt
        self._verify: dict[int, list[float]] = defaultdict(list)
        self._draft: dict[str, list[float]] = defaultdict(list)
        self._n_experts: dict[int, list[float]] = defaultdict(list)
        self._experts_share: dict[int, list[float]] = defaultdict(list)

    @property
    def n_tokens_needed(self) -> int:
        return self.n_prompt + N_WARM_UP_STEPS + N_ADVANCE * self.n_rounds + self.widths[-1]

    def run(self, text: Sequence[int], on_round: OnRound = lambda n: None) -> Profile:
        """Measure over `text`, repeated if it is too short."""
        tokens = self._tokens(text)
        position = self._warm_up(tokens)
        rng = random.Random(0)
        for i in range(self.n_rounds):
            for n in rng.sample(self.widths, len(self.widths)):
                self._measure(tokens[position : position + n])
            self._measure_drafters(tokens[: position + 1])
            self._step(tokens[position : position + N_ADVANCE])
            position += N_ADVANCE
            on_round(i + 1)
        return self._profile()

    def _tokens(self, text: Sequence[int]) -> list[int]:
        if self.n_tokens_needed > self.session.context.n_ctx:
            wanted = (
                f"{self.n_tokens_needed} or more, which {self.n_rounds} rounds after a prompt of "
                f"{self.n_prompt} tokens need"
            )
            raise ConfigError("-c", self.session.context.n_ctx, wanted)
        if not text:
            raise UsageError("the text to measure on is empty: give a longer one with -f")
        return (list(text) * (self.n_tokens_needed // len(text) + 1))[: self.n_tokens_needed]

    def _warm_up(self, tokens: Sequence[int]) -> int:
        self.session.context.decode(tokens[: self.n_prompt], 0)
        if self.session.split:
            self.session.split.after_prompt()
        for i in range(N_WARM_UP_STEPS):
            self._step(tokens[self.n_prompt + i : self.n_prompt + i + 1])
        position = self.n_prompt + N_WARM_UP_STEPS
        for n in self.widths:  # the first pass of each width sets up its graph
            self._forward(tokens[position : position + n])
        return position

    def _step(self, tokens: Sequence[int]) -> None:
        """Go on in the text, as a decoding step would."""
        self.session.context.decode(tokens, 1)
        if self.session.split:
            n = len(tokens)
            self.session.split.after_step(StepRecord(n_draft=n - 1, n_accepted=n - 1, n_tokens=n))

    def _forward(self, tokens: Sequence[int]) -> float:
        """Time one pass that gives all logits, and take it back; microseconds."""
        context = self.session.context
        n_past = context.n_past
        start = time.perf_counter_ns()
        context.decode(tokens, len(tokens))
        us = (time.perf_counter_ns() - start) / 1e3
        context.rollback(n_past)
        if self.session.split:
            self.session.split.engine.end_forward()
        return us

    def _measure(self, tokens: Sequence[int]) -> None:
        n = len(tokens)
        self._forward(tokens)  # sets up the graph of this width
        before = layer_sums(self.session.split)
        us = self._forward(tokens)
        n_experts, experts_us, n_calls = (
            b - a for a, b in zip(before, layer_sums(self.session.split), strict=True)
        )
        self._verify[n].append(us)
        if n_calls:
            self._n_experts[n].append(n_experts / n_calls)
            if experts_us:
                self._experts_share[n].append(experts_us / us)

    def _measure_drafters(self, tokens: Sequence[int]) -> None:
        if self.session.options.effective_spec_type == "draft":
            self._time_draft("model", self.session.drafter, tokens)
        ngram = NgramDrafter()
        ngram.draft(tokens[:-1], N_DRAFT)  # the index of what came before
        self._time_draft("n-gram", ngram, tokens)

    def _time_draft(self, name: str, drafter: Drafter, tokens: Sequence[int]) -> None:
        """Drafting one token; the drafter knows all but the last few of `tokens`."""
        if name == "model" and not self._draft[name]:
            drafter.prepare(tokens[:-1])
        start = time.perf_counter_ns()
        draft = drafter.draft(tokens, N_DRAFT)
        us = (time.perf_counter_ns() - start) / 1e3
        drafter.accept(0)
        self._draft[name].append(us / max(1, len(draft.tokens) if name == "model" else N_DRAFT))

    def _profile(self) -> Profile:
        return Profile(
            verify={n: Samples(tuple(us)) for n, us in self._verify.items()},
            drafters={name: Samples(tuple(us)) for name, us in self._draft.items()},
            n_experts={n: mean(values) for n, values in self._n_experts.items()},
            experts_share={n: mean(values) for n, values in self._experts_share.items()},
        )
