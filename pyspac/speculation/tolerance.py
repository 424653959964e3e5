"""What `pyspac profile` found, and what follows from it: gamma-tolerance, speedups, break-even, advice.

In: times of forward passes by width, and of drafters. Out: a `Profile`, its rows and its JSON object.
Everything here is arithmetic on measured times, by equation 1 of gamma-tolerance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pyspac.speculation.utility import break_even, expected_tokens, speedup

ACCEPTANCES: Final = tuple(round(0.05 * i, 2) for i in range(21))  # of the surface
SHOWN_ACCEPTANCES: Final = (0.5, 0.7, 0.9)  # of the table
GOOD_ACCEPTANCE: Final = 0.8  # the advice takes the draft length that is best there
NOISY: Final = 0.1  # spread; other work on the machine, most likely
WORTHWHILE: Final = 1.05  # a speedup below this is not worth advising


@dataclass(frozen=True, slots=True)
class Samples:
    """Repeated measurements of one thing; microseconds."""

    us: tuple[float, ...]

    @property
    def median_us(self) -> float:
        return median(self.us)

    def quartiles_us(self) -> tuple[float, float]:
        """The spread: a quarter of the samples lies below, a quarter above."""
        low, high = np.percentile(self.us, [25, 75])
        return float(low), float(high)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a share of the median."""
        low, high = self.quartiles_us()
        return (high - low) / 2 / self.median_us

    def to_dict(self) -> dict[str, float]:
        """As `--json` has it."""
        low, high = self.quartiles_us()
        return {"median": self.median_us, "q1": low, "q3": high, "n": len(self.us)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Measured on one machine, with one model and placement."""

    verify: Mapping[int, Samples]  # by width, from 1
    drafters: Mapping[str, Samples]  # per drafted token, by drafter
    n_experts: Mapping[int, float] = field(default_factory=dict)  # distinct per layer; {}: not known
    experts_share: Mapping[int, float] = field(default_factory=dict)  # of verify's time

    @property
    def n_draft_max(self) -> int:
        return max(self.verify) - 1

    @property
    def is_noisy(self) -> bool:
        """Whether the times vary too much to build on."""
        return median(samples.spread for samples in self.verify.values()) > NOISY

    def tau(self, n_tokens: int) -> float:
        """T(1) / T(n): section 3.1."""
        return self.verify[1].median_us / self.verify[n_tokens].median_us

    def delta(self, drafter: str) -> float:
        """T_draft / T(1)."""
        return self.drafters[drafter].median_us / self.verify[1].median_us

    def speedup(self, n_draft: int, acceptance: float, drafter: str) -> float:
        """S of equation 1."""
        return speedup(n_draft, acceptance, self.tau(n_draft + 1), self.delta(drafter))

    def surface(self, drafter: str) -> NDArray[np.float64]:
        """S: [n_draft_max, len(ACCEPTANCES)], draft lengths from 1."""
        return np.array(
            [[self.speedup(k, a, drafter) for a in ACCEPTANCES] for k in range(1, self.n_draft_max + 1)]
        )

    def break_even(self, n_draft: int, drafter: str) -> float | None:
        """The acceptance from which this draft length pays; None: it never does."""
        return break_even(n_draft, self.tau(n_draft + 1), self.delta(drafter))

    def best_n_draft(self, acceptance: float, drafter: str) -> int:
        """The draft length with the highest speedup, 0 if none is above 1."""
        lengths = range(self.n_draft_max + 1)
        return max(lengths, key=lambda k: (self.speedup(k, acceptance, drafter) if k else 1.0, -k))

    def experts_ratio(self, n_draft: int) -> float | None:
        """a/b of MoE-SpAc's Figure 7: experts touched with so many drafts, over those without."""
        touched, plain = self.n_experts.get(n_draft + 1), self.n_experts.get(1)
        return touched / plain if touched and plain else None

    def experts_text(self) -> str | None:
        """Where drafts load fewer experts for each token (a/b < Omega); None: not known."""
        lengths = range(1, self.n_draft_max + 1)
        pairs = [
            (k, ratio, expected_tokens(k, GOOD_ACCEPTANCE))
            for k in lengths
            if (ratio := self.experts_ratio(k)) is not None
        ]
        if not pairs:
            return None
        told = ", ".join(
            f"K={k} {ratio:.2f}{'<' if ratio < tokens else '>='}{tokens:.2f}" for k, ratio, tokens in pairs
        )
        return f"experts touched against tokens gained at acceptance {GOOD_ACCEPTANCE} (a/b, Omega): {told}"

    def advice(self) -> str:
        """One sentence for each drafter, joined."""
        return "; ".join(self._advice_for(drafter) for drafter in self.drafters)

    def _advice_for(self, drafter: str) -> str:
        k = self.best_n_draft(GOOD_ACCEPTANCE, drafter)
        name = f"with the {drafter} drafter"
        if k and self.speedup(k, GOOD_ACCEPTANCE, drafter) >= WORTHWHILE:
            return f"{name}, speculate up to K={k} when acceptance is above {self.break_even(k, drafter):.2f}"
        k = self.best_n_draft(1.0, drafter)
        if k and self.speedup(k, 1.0, drafter) >= WORTHWHILE:
            even = self.break_even(k, drafter)
            return f"{name}, speculate only when acceptance is above {even:.2f}, up to K={k}"
        return f"{name}, do not speculate: no draft length pays even if every token holds"

    # ---------------------------------------------------------------------------------------- reports

    def rows(self, drafter: str) -> list[list[str]]:
        """The table, one row per width."""
        return [self._row(n, drafter) for n in sorted(self.verify)]

    def _row(self, n: int, drafter: str) -> list[str]:
        even = self.break_even(n - 1, drafter) if n > 1 else None
        return [
            str(n),
            f"{self.verify[n].median_us / 1e3:.2f}",
            f"{self.verify[n].spread:.0%}",
            f"{self.tau(n):.2f}",
            f"{self.n_experts[n]:.1f}" if n in self.n_experts else "-",
            f"{self.experts_share[n]:.0%}" if n in self.experts_share else "-",
            *(f"{self.speedup(n - 1, a, drafter):.2f}" for a in SHOWN_ACCEPTANCES),
            "-" if n == 1 else "never" if even is None else f"{even:.2f}",
        ]

    def to_dict(self) -> dict[str, Any]:
        """The object of `--json`."""
        widths = sorted(self.verify)
        return {
            "verify_us": {str(n): self.verify[n].to_dict() for n in widths},
            "tau": {str(n): self.tau(n) for n in widths},
            "n_experts": {str(n): self.n_experts.get(n) for n in widths},
            "experts_ratio": {str(n): self.experts_ratio(n - 1) for n in widths},
            "experts_share": {str(n): self.experts_share.get(n) for n in widths},
            "acceptances": list(ACCEPTANCES),
            "drafters": {name: self._drafter_dict(name) for name in self.drafters},
            "advice": self.advice(),
        }

    def _drafter_dict(self, name: str) -> dict[str, Any]:
        lengths = range(1, self.n_draft_max + 1)
        return {
            "draft_us": self.drafters[name].to_dict(),
            "delta": self.delta(name),
            "break_even": {str(k): self.break_even(k, name) for k in lengths},
            "best_n_draft": {str(a): self.best_n_draft(a, name) for a in ACCEPTANCES},
            "speedup": {str(k): [self.speedup(k, a, name) for a in ACCEPTANCES] for k in lengths},
        }
