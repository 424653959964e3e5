"""Shadow drafts: what a free drafter would have drafted, compared with the text that came instead.

Wraps a drafter that looks at the text alone. While speculation is off it notes where plain steps stood. When
it is asked (`compare`) it drafts there and compares with the text that came: acceptance without verifying
anything, and no work between two forward passes. Under greedy decoding that is what verification would have
said. Under sampling it has the same chance: a deterministic draft x is accepted with probability p(x), and
x is drawn with probability p(x).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pyspac.generate.drafting import DrafterAround, DraftResult, FreeDrafter

OnShadow = Callable[[int, int], None]  # (n_draft, n_held)


class ShadowDrafter(DrafterAround):
    """A drafter around another; nothing in most steps, O(n_cap) per plain step when it is asked."""

    inner: FreeDrafter

    def __init__(self, inner: FreeDrafter, n_cap: int, on_shadow: OnShadow) -> None:
        """`on_shadow` hears of every shadow once it is decided, of an empty one as (0, 0)."""
        super().__init__(inner)
        self.n_cap = n_cap
        self.on_shadow = on_shadow
        self._tokens: Sequence[int] = ()  # the loop's own list: grows
        self._waiting: list[int] = []  # lengths of the sequence at plain steps that were not looked at
        self._open: list[tuple[int, list[int]]] = []  # position after which it stands, draft

    def prepare(self, tokens: Sequence[int]) -> None:
        self._forget()
        super().prepare(tokens)

    def draft(self, tokens: Sequence[int], n_max: int) -> DraftResult:
        if n_max > 0:
            self._forget()
            return self.inner.draft(tokens, n_max)
        self._tokens = tokens
        self._waiting.append(len(tokens))
        return DraftResult()

    def _forget(self) -> None:
        self._waiting.clear()
        self._open.clear()

    def compare(self) -> None:
        """Draft at all plain steps since the last call, and tell of what the text has decided."""
        for end in self._waiting:
            shadow = self.inner.draft_at(self._tokens, end, self.n_cap)
            if shadow:
                self._open.append((end, shadow))
            else:
                self.on_shadow(0, 0)
        self._waiting.clear()
        self._open = [(end, shadow) for end, shadow in self._open if not self._is_decided(end, shadow)]

    def _is_decided(self, end: int, shadow: list[int]) -> bool:
        """Whether the text has come to the first difference, or to the draft's end; if so it is told."""
        text = self._tokens[end : end + len(shadow)]
        n_held = 0
        while n_held < len(text) and shadow[n_held] == text[n_held]:
            n_held += 1
        is_decided = n_held < len(text) or n_held == len(shadow)
        if is_decided:
            self.on_shadow(len(shadow), n_held)
        return is_decided
