"""A greedy continuation by a bare context, for tests that compare texts."""

from __future__ import annotations

from pyspac.forward.context import Context


def greedy_text(context: Context, prompt: str, n_tokens: int) -> list[int]:
    """The tokens that follow; the context has to be empty, and keeps them."""
    new, found = context.model.vocab.tokenize(prompt), []
    for _ in range(n_tokens):
        new = [int(context.decode(new)[0].argmax())]
        found += new
    return found
