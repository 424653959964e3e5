"""Measures T(n) of a model by number of sequences and length of context.

In: a `Runner` whose context has as many sequences as are asked for at most. Out: a `Sweep`. As in the
`Profiler`, every round runs all widths in random order at the same place of the texts, each taken back again,
and then the texts move on: so the widths of one place, and all numbers of sequences, meet the same
disturbances. Every sequence reads another part of the text, or all would use the same experts.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from statistics import mean
from typing import TYPE_CHECKING

from pyspac.errors import ConfigError, UsageError
from pyspac.forward.profiler import N_ADVANCE, N_WARM_UP_STEPS, OnRound, layer_sums
from pyspac.speculation.sweep import Sweep
from pyspac.speculation.tolerance import Profile, Samples

if TYPE_CHECKING:
    from pyspac.forward.runner import Runner
    from pyspac.forward.sequences import Rows


def n_tokens_needed(n_context: int, n_rounds: int, width_max: int) -> int:
    """Tokens of every sequence, where the first measurement has `n_context` before it."""
    return n_context + N_WARM_UP_STEPS + N_ADVANCE * n_rounds + width_max


class Sweeper:
    """One sweep of one model; uses up its context."""

    def __init__(
        self,
        runner: Runner,
        *,
        widths: Sequence[int],
        sequences: Sequence[int],
        contexts: Sequence[int],
        n_rounds: int,
    ) -> None:
        """`widths`: tokens of each sequence in a pass, 1 among them; `contexts`: tokens before a pass."""
        from pyspac.forward.sequences import Sequences  # loads libllama

        self.runner = runner
        self.widths, self.sequences, self.contexts = widths, sequences, sorted(contexts)
        self.n_rounds = n_rounds
        self._sequences = Sequences(runner.context)

    def run(self, text: Sequence[int], on_round: OnRound = lambda n: None) -> Sweep:
        """Measure over `text`, repeated if it is too short. `on_round`: rounds done, of all contexts."""
        rows = self._rows(text)
        profiles: dict[tuple[int, int], Profile] = {}
        with self._sequences:
            for i, n_context in enumerate(self.contexts):
                found = self._measure_at(n_context, rows, i * self.n_rounds, on_round)
                profiles |= {(n_sequences, n_context): profile for n_sequences, profile in found.items()}
        return Sweep(profiles)

    def _rows(self, text: Sequence[int]) -> list[list[int]]:
        """The text of every sequence."""
        if not text:
            raise UsageError("the text to measure on is empty: give a longer one with -f")
        n = n_tokens_needed(self.contexts[-1], self.n_rounds, max(self.widths))
        if n > self.runner.context.n_ctx:
            wanted = f"{n} or more, which {self.n_rounds} rounds after {self.contexts[-1]} tokens need"
            raise ConfigError("-c", self.runner.context.n_ctx, wanted)
        n_rows = max(self.sequences)
        starts = [i * len(text) // n_rows for i in range(n_rows)]
        return [[text[(start + j) % len(text)] for j in range(n)] for start in starts]

    def _measure_at(self, n_context: int, rows: Rows, n_done: int, on_round: OnRound) -> dict[int, Profile]:
        """All widths and numbers of sequences, after `n_context` tokens."""
        self._go_to(n_context, rows)
        us: dict[tuple[int, int], list[float]] = defaultdict(list)
        n_experts: dict[tuple[int, int], list[float]] = defaultdict(list)
        places = list(product(self.sequences, self.widths))
        rng = random.Random(0)
        for i in range(self.n_rounds):
            for place in rng.sample(places, len(places)):
                measured, experts = self._measure(rows, *place)
                us[place].append(measured)
                n_experts[place] += experts
            self._step(rows, N_ADVANCE)
            on_round(n_done + i + 1)
        return {
            m: Profile(
                verify={n: Samples(tuple(us[m, n])) for n in self.widths},
                drafters={},
                n_experts={n: mean(n_experts[m, n]) for n in self.widths if n_experts[m, n]},
            )
            for m in self.sequences
        }

    def _go_to(self, n_context: int, rows: Rows) -> None:
        """Read the texts up to there, and let the scheduler place experts."""
        self._sequences.rollback(min(n_context, self._sequences.n_past))
        self._sequences.read([row[self._sequences.n_past : n_context] for row in rows])
        self.runner.after_prompt()
        for _ in range(N_WARM_UP_STEPS):
            self._step(rows, 1)

    def _next(self, rows: Rows, n_sequences: int, n: int) -> Rows:
        n_past = self._sequences.n_past
        return [row[n_past : n_past + n] for row in rows[:n_sequences]]

    def _step(self, rows: Rows, n: int) -> None:
        """Go on in all texts, as a decoding step would."""
        tokens = self._next(rows, len(rows), n)
        self._sequences.decode(tokens, has_logits=False)  # of none: there is room only for the widths'
        self.runner.after_step(n, len(rows))

    def _measure(self, rows: Rows, n_sequences: int, n: int) -> tuple[float, list[float]]:
        """Microseconds of a pass, and distinct experts per layer, if they are known."""
        tokens = self._next(rows, n_sequences, n)
        self._forward(tokens)  # sets up the graph of this width
        before = layer_sums(self.runner)
        us = self._forward(tokens)
        n_experts, _us, n_calls = (b - a for a, b in zip(before, layer_sums(self.runner), strict=True))
        return us, [n_experts / n_calls] if n_calls else []

    def _forward(self, tokens: Rows) -> float:
        """Time one pass that gives all logits, and take it back; microseconds."""
        n_past = self._sequences.n_past
        start = time.perf_counter_ns()
        self._sequences.decode(tokens)
        us = (time.perf_counter_ns() - start) / 1e3
        self._sequences.rollback(n_past)
        self.runner.end_forward()
        return us
