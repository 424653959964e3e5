"""Shadow drafts: what a free drafter would have drafted, compared with the text that came instead.

Wraps an n-gram drafter. While speculation is off it drafts all the same, hands out nothing, and compares the
draft with the text once that is known: acceptance without verifying anything. Under greedy decoding the
comparison is what verification would have said. Under sampling it has the same chance: a deterministic draft
x is accepted with probability p(x), and x is drawn with probability p(x).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pyspac.generate.drafting import Drafter, DraftResult

OnShadow = Callable[[int, int], None]  # (n_draft, n_held)


class ShadowDrafter(Drafter):
    """A drafter around another; O(n_cap) per plain step, nothing in steps that draft."""

    def __init__(self, inner: Drafter, n_cap: int, on_shadow: OnShadow) -> None:
        """`on_shadow` hears of every shadow once it is decided, of an empty one as (0, 0)."""
        self.inner = inner
        self.n_cap = n_cap
        self.on_shadow = on_shadow
        self._open: list[tuple[int, list[int]]] = []  # position after which it stands, draft

    def prepare(self, tokens: Sequence[int]) -> None:
        self._open = []
        self.inner.prepare(tokens)

    def draft(self, tokens: Sequence[int], n_max: int) -> DraftResult:
        if n_max > 0:
            self._open.clear()
            return self.inner.draft(tokens, n_max)
        self._resolve(tokens)
        shadow = self.inner.draft(tokens, self.n_cap).tokens
        if shadow:
            self._open.append((len(tokens), shadow))
        else:
            self.on_shadow(0, 0)
        return DraftResult()

    def accept(self, n: int) -> None:
        self.inner.accept(n)

    def _resolve(self, tokens: Sequence[int]) -> None:
        """Report the drafts that the text has decided: at the first difference, or at their end."""
        still_open = []
        for start, draft in self._open:
            n_known = min(len(draft), len(tokens) - start)
            n_held = n_known
            for i in range(n_known):
                if draft[i] != tokens[start + i]:
                    n_held = i
                    break
            if n_held < n_known or n_known == len(draft):
                self.on_shadow(len(draft), n_held)
            else:
                still_open.append((start, draft))
        self._open = still_open
