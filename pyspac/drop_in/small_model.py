"""A small model as llama-cpp-python's draft model: the likeliest tokens, from a context of its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from pyspac.drop_in.steps import TokenIds, n_alike
from pyspac.forward.context import Context

from llama_cpp.llama_speculative import LlamaDraftModel  # isort: skip  # after ours: see steps.py


class SmallModel(LlamaDraftModel):  # type: ignore[misc]  # llama-cpp-python has no types
    """Greedy: a drafted token is accepted where the target draws it."""

    def __init__(self, context: Context, n_draft: int) -> None:
        """`context`: an empty one, which keeps what two texts begin with."""
        self.context, self.n_draft = context, n_draft
        self._held: TokenIds = np.zeros(0, np.intc)

    def __call__(self, input_ids: TokenIds, /, **_kwargs: Any) -> TokenIds:
        """At most `n_draft` tokens to follow `input_ids`; fewer where the context ends."""
        ids, context = np.array(input_ids, np.intc), self.context
        n_draft = min(self.n_draft, context.n_ctx - len(ids) + 1)
        if n_draft < 1:
            return np.zeros(0, np.intc)
        context.rollback(min(n_alike(self._held, ids), context.n_past, len(ids) - 1))
        tokens = ids[context.n_past :].tolist()
        drafted: list[int] = []
        self._held = ids
        for _ in range(n_draft):
            tokens = [int(context.decode(tokens)[0].argmax())]
            drafted += tokens
        self._held = np.concatenate((ids, np.array(drafted[:-1], np.intc)))
        return np.array(drafted, np.intc)
