"""What the evals of one `llama_cpp.Llama` were: drafts counted, a record of each step to the board.

A step's outcome shows in the tokens that come next: what was drafted and is found there again was accepted.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt

from pyspac.engine.board import Board
from pyspac.engine.step import StepRecord, StepTotals

import pyspac._native  # noqa: F401  isort: skip  before the bindings: it tells them where libllama is
from llama_cpp.llama_speculative import LlamaDraftModel

TokenIds = npt.NDArray[np.intc]  # [n]


class Steps:
    """Of one `Llama`."""

    def __init__(self) -> None:
        self.board: Board | None = None  # gets a record of each step once its outcome is known
        self.totals = StepTotals()
        self.n_drafted = 0  # tokens of the next eval that are drafts
        self._draft_us = 0.0
        self._pending: StepRecord | None = None  # verified; its outcome is not known yet

    def begin(self) -> None:
        """Another text: the fate of the last drafts stays unknown."""
        self._pending = None
        self.n_drafted = 0

    def drafted(self, n_draft: int, draft_us: float) -> None:
        self.n_drafted, self._draft_us = n_draft, draft_us

    def evaluated(self, n_tokens: int, verify_us: float) -> None:
        """Of a prompt there is no record."""
        n_draft, self.n_drafted = self.n_drafted, 0
        if n_tokens != 1 + n_draft:
            return
        self._pending = StepRecord(
            step=self.totals.n_steps,
            n_draft=n_draft,
            n_tokens=n_tokens,
            draft_us=self._draft_us if n_draft else 0.0,
            verify_us=verify_us,
        )
        if not n_draft:
            self.ended(0)

    def ended(self, n_accepted: int) -> None:
        """Of its drafts so many were accepted."""
        step, self._pending = self._pending, None
        if step is not None:
            step.n_accepted = min(max(0, n_accepted), step.n_draft)
            self.totals.add([step])
            if self.board is not None:
                self.board.record_step(step)


class CountedDrafts(LlamaDraftModel):  # type: ignore[misc]  # llama-cpp-python has no types
    """A draft model whose drafts fit into a batch and the context, and are counted."""

    def __init__(self, model: LlamaDraftModel, steps: Steps, *, n_draft_max: int, n_ctx: int) -> None:
        self.model, self.steps = model, steps
        self.n_draft_max, self.n_ctx = n_draft_max, n_ctx
        self._seen: TokenIds = np.zeros(0, np.intc)  # the tokens of the last call, and its drafts
        self._n_draft = 0

    def __call__(self, input_ids: TokenIds, /, **kwargs: Any) -> TokenIds:
        ids = np.array(input_ids)  # a copy: it is a view of what changes
        self.steps.ended(n_alike(self._seen, ids) - (len(self._seen) - self._n_draft))
        start_ns = time.perf_counter_ns()
        n_max = max(0, min(self.n_draft_max, self.n_ctx - len(ids)))
        drafted = np.asarray(self.model(ids, **kwargs), np.intc)[:n_max]
        self.steps.drafted(len(drafted), (time.perf_counter_ns() - start_ns) / 1e3)
        self._seen, self._n_draft = np.concatenate((ids, drafted)), len(drafted)
        return drafted


def n_alike(a: TokenIds, b: TokenIds) -> int:
    """How many tokens they begin with alike."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n
