"""What a run measured: step records in, the usual figures out.

TTFT is the time from the start of prompt processing to the first token; TPOT = (end-to-end - TTFT) / (tokens
- 1); TPS = 1 / TPOT, so prompt processing is not in it. acceptance_rate = accepted / drafted;
acceptance_length = tokens per step = 1 + accepted / steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class StepMetrics:
    """One decoding step (one draft + verify cycle); times in microseconds."""

    n_draft: int
    n_accepted: int
    n_tokens: int  # width of the verified batch
    draft_us: int = 0
    verify_us: int = 0
    sample_us: int = 0  # verification's decision
    process_us: int = 0  # taking rejected tokens back
    schedule_us: int = 0  # the scheduler's step


@dataclass(slots=True)
class Metrics:
    """Filled by the decode loop, one object per generation; `*_s` are seconds of `time.perf_counter()`."""

    n_prompt: int = 0
    n_tokens: int = 0  # generated
    start_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    steps: list[StepMetrics] = field(default_factory=list)

    def mark_tokens(self, n: int, now_s: float) -> None:
        """`n` tokens came out at `now_s`."""
        if n and not self.n_tokens:
            self.first_token_s = now_s
        if n:
            self.last_token_s = now_s
        self.n_tokens += n

    @property
    def n_steps(self) -> int:
        return len(self.steps)

    @property
    def n_drafted(self) -> int:
        return sum(step.n_draft for step in self.steps)

    @property
    def n_accepted(self) -> int:
        return sum(step.n_accepted for step in self.steps)

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

    @property
    def acceptance_rate(self) -> float | None:
        """None if nothing was drafted."""
        return self.n_accepted / self.n_drafted if self.n_drafted else None

    @property
    def acceptance_length(self) -> float | None:
        return 1 + self.n_accepted / self.n_steps if self.n_steps else None

    def to_dict(self) -> dict[str, float | int | None]:
        """The figures under their names in `--json`."""
        return {
            "n_tokens": self.n_tokens,
            "ttft_ms": self.ttft_ms,
            "tpot_ms": self.tpot_ms,
            "tps": self.tps,
            "n_steps": self.n_steps,
            "n_drafted": self.n_drafted,
            "n_accepted": self.n_accepted,
            "acceptance_rate": self.acceptance_rate,
            "acceptance_length": self.acceptance_length,
        }
