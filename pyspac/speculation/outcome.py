"""What one step did, as the decode loop or a server's step record tells it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)  # one for each step: frozen ones take twice as long to make
class StepOutcome:
    """One draft + verify step of one sequence. Times in microseconds."""

    n_draft: int  # tokens drafted and verified; may be fewer than asked for
    n_accepted: int
    n_tokens: int = 0  # width of the verified batch, all sequences in it; 0: 1 + n_draft
    draft_us: float = 0.0
    verify_us: float = 0.0
    process_us: float = 0.0  # sampling, taking back, handing out
    overhead_us: float = 0.0  # what else the step took: scheduling, the loop itself
    experts_us: float = 0.0  # the experts' part of verify_us; 0: not known
    slot: int = 0

    @property
    def width(self) -> int:
        """Tokens of the verified batch."""
        return max(self.n_tokens, 1 + self.n_draft)

    @property
    def n_others(self) -> int:
        """Tokens of other sequences in the same batch."""
        return self.width - 1 - self.n_draft

    @property
    def n_emitted(self) -> int:
        """Accepted drafts and the target's own token."""
        return 1 + self.n_accepted

    @property
    def total_us(self) -> float:
        return self.draft_us + self.verify_us + self.process_us + self.overhead_us
