"""gamma-tolerance by batch and context: one `Profile` for each number of sequences and length of context.

In: what was measured at every place. Out: rows of `--json` and of the table. Gamma-Tolerance, figure 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pyspac.speculation.tolerance import Profile

ADVISED_WIDTH: Final = 5  # tokens of each sequence: four drafted, as --draft-max is where it is fixed


@dataclass(frozen=True, slots=True)
class Sweep:
    """`profiles`: by (sequences in a batch, tokens in the context of each); none has a drafter."""

    profiles: Mapping[tuple[int, int], Profile]

    @property
    def sequences(self) -> list[int]:
        return sorted({n for n, _ in self.profiles})

    @property
    def contexts(self) -> list[int]:
        return sorted({n for _, n in self.profiles})

    @property
    def widths(self) -> list[int]:
        """Tokens of each sequence in a pass."""
        return sorted(next(iter(self.profiles.values())).verify)

    @property
    def is_noisy(self) -> bool:
        """Whether the times of one place or more vary too much to build on."""
        return any(profile.is_noisy for profile in self.profiles.values())

    def advice(self) -> str:
        """One sentence: what a draft has to yield, where verification is cheapest and where it is dearest."""
        n = max(width for width in self.widths if width <= ADVISED_WIDTH)
        by_tau = sorted(self.profiles, key=lambda place: self.profiles[place].tau(n))
        dear, cheap = (
            f"{1 / self.profiles[place].tau(n):.1f} tokens with {place[0]} in a batch after {place[1]} tokens"
            for place in (by_tau[0], by_tau[-1])
        )
        pays = f"a free draft of {n - 1} pays where a step yields more than {cheap}"
        return pays if len(by_tau) == 1 else f"{pays}, or {dear}"

    def to_dict(self) -> dict[str, Any]:
        """The object of `--json`."""
        return {"rows": self.rows()}

    def rows(self) -> list[dict[str, Any]]:
        """One per place and width; `us`: of the whole batch; `tau`: at that place."""
        return [
            {"sequences": n_sequences, "context": n_context, "width": n}
            | {"us": profile.verify[n].to_dict(), "tau": profile.tau(n)}
            | {"n_experts": profile.n_experts.get(n)}
            for (n_sequences, n_context), profile in sorted(self.profiles.items())
            for n in sorted(profile.verify)
        ]
