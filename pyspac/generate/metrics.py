"""What a run measured: step records in, the usual figures out.

TTFT is the time from the start of prompt processing to the first token; TPOT = (end-to-end - TTFT) / (tokens
- 1); TPS = 1 / TPOT, so prompt processing is not in it. acceptance_rate = accepted / drafted;
acceptance_length = tokens per step = 1 + accepted / steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pyspac.engine.step import StepRecord, StepTotals


@dataclass(slots=True)
class Metrics:
    """Filled by the decode loop, one object per generation; `*_s` are seconds of `time.perf_counter()`."""

    n_prompt: int = 0
    n_cached: int = 0  # tokens of the prompt that were in the context before
    n_tokens: int = 0  # generated
    start_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    steps: list[StepRecord] = field(default_factory=list)

    def mark_tokens(self, n: int, now_s: float) -> None:
        """`n` tokens came out at `now_s`."""
        if n and not self.n_tokens:
            self.first_token_s = now_s
        if n:
            self.last_token_s = now_s
        self.n_tokens += n

    @property
    def totals(self) -> StepTotals:
        """Sums over the steps so far."""
        return StepTotals().add(self.steps)

    @property
    def ttft_ms(self) -> float | None:
        """None before the first token."""
        return (self.first_token_s - self.start_s) * 1e3 if self.n_tokens else None

    @property
    def tpot_ms(self) -> float | None:
        """None with fewer than two tokens."""
        if self.n_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) * 1e3 / (self.n_tokens - 1)

    @property
    def tps(self) -> float | None:
        return 1e3 / self.tpot_ms if self.tpot_ms else None

    def to_dict(self) -> dict[str, float | int | None]:
        """The figures under their names in `--json`."""
        return {
            "n_tokens": self.n_tokens,
            "ttft_ms": self.ttft_ms,
            "tpot_ms": self.tpot_ms,
            "tps": self.tps,
            **self.totals.to_dict(),
        }
