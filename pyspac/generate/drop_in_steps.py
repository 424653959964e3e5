"""What runs between the evals of a `llama_cpp.Llama`: drafts, and the engine's and the scheduler's part.

In: a drafter, the split, token ids as llama-cpp-python hands them over. Out: drafted tokens, step records. It
sees a step's outcome in the tokens that come next: what it drafted and finds again there was accepted.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pyspac.engine.step import StepRecord, StepTotals
from pyspac.generate.drafting import Drafter, DraftResult, NoDrafter
from pyspac.generate.options import DEFAULT_DRAFT_MAX
from pyspac.generate.speculation_hook import SpeculationHook
from pyspac.speculation.manager import Speculation

import pyspac._native  # noqa: F401  isort: skip  before the bindings: it tells them where libllama is
from llama_cpp.llama_speculative import LlamaDraftModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspac.generate.decode import StepHook
    from pyspac.generate.split import Split

TokenIds = npt.NDArray[np.intc]  # [n]


class ForeignDrafter(Drafter):
    """A draft model of llama-cpp-python's as one of ours; it is asked for everything anew each time."""

    def __init__(self, model: LlamaDraftModel) -> None:
        self.model = model

    def draft(self, tokens: Sequence[int], n_max: int) -> DraftResult:
        drafted = self.model(np.asarray(tokens, np.intc))[: max(0, n_max)]
        return DraftResult([int(token) for token in drafted])


class DropInSteps(LlamaDraftModel):  # type: ignore[misc]  # llama-cpp-python has no types
    """The steps of one `Llama`, which has it as its `draft_model` if anything drafts."""

    def __init__(
        self,
        split: Split | None,
        drafter: Drafter | None = None,
        speculation: Speculation | None = None,
        *,
        n_draft_max: int = 0,
        n_ctx: int = 0,
    ) -> None:
        """`speculation`: None: as many tokens are drafted as the drafter likes, at most `n_draft_max`."""
        self.split = split
        self.drafter = drafter or NoDrafter()
        self.speculation = speculation
        self.n_draft_max = n_draft_max
        self.n_ctx = n_ctx
        self.totals = StepTotals()
        self._hook: StepHook | None = None
        self.begin()
        self._seen: TokenIds = np.empty(
            0, np.intc
        )  # what the drafter saw and drafted last, also in former generations

    def begin(self, *, must_repeat: bool = False) -> None:
        """A new generation; what became of the last step of the one before is not known.

        `must_repeat`: draft lengths must not follow times, which differ.
        """
        if isinstance(self._hook, SpeculationHook):
            self._hook.finish()
        speculation = None if must_repeat else self.speculation
        hook = SpeculationHook(speculation, self.drafter, self.split) if speculation else None
        is_fixed = speculation is not self.speculation
        self._n_draft_max = min(self.n_draft_max, DEFAULT_DRAFT_MAX) if is_fixed else self.n_draft_max
        self._hook = hook or self.split
        self._drafter = hook.drafter if hook else self.drafter
        self._is_new = True
        self._drafted: StepRecord | None = None  # drafts that wait for their eval
        self._pending: StepRecord | None = None  # a step whose accepted tokens are not known yet
        self._n_steps = 0

    @property
    def n_drafted(self) -> int:
        """Tokens of the next eval that are drafts."""
        return self._drafted.n_draft if self._drafted else 0

    @property
    def n_masks(self) -> int:
        """Mask tokens that the next eval has besides."""
        return self._drafted.n_masks if self._drafted else 0

    def __call__(self, input_ids: TokenIds, /, **_kwargs: object) -> TokenIds:
        """Tokens to follow `input_ids`, whose last one is not computed yet; maybe none."""
        ids = np.array(input_ids)  # a copy: it is a view of what changes
        self._take_outcome(ids)
        start_ns = time.perf_counter_ns()
        draft = self._drafter.draft(ids, self._limit(len(ids)))  # type: ignore[arg-type]
        self._drafted = StepRecord(
            step=self._n_steps,
            n_draft=len(draft.tokens),
            n_tokens=1 + len(draft.tokens) + draft.n_masks,
            n_masks=draft.n_masks,
            n_matched=draft.n_matched,
            draft_us=_us_since(start_ns),
        )
        drafted = np.array(draft.tokens, np.intc)
        self._seen = np.concatenate((ids, drafted))
        return drafted

    def _limit(self, n_tokens: int) -> int:
        """The longest draft after so many tokens."""
        limits = [self._n_draft_max, self.n_ctx - n_tokens]
        if self._hook and (limit := self._hook.n_draft_limit()) is not None:
            limits.append(limit)
        return max(0, min(limits))

    def _take_outcome(self, ids: TokenIds) -> None:
        """Tell drafter and hook what became of the last drafts."""
        n_kept = _n_alike(self._seen, ids)
        if self._is_new:
            self._is_new = False
            self._drafter.keep(min(n_kept, len(ids) - 1))
            self._drafter.prepare(ids)  # type: ignore[arg-type]
        elif self._pending:
            n_accepted = n_kept - (len(self._seen) - self._pending.n_draft)
            self._drafter.accept(n_accepted)
            self._pending.n_accepted = max(0, n_accepted)
            self._finish(self._pending)
        self._pending = None

    def after_eval(self, n_tokens: int, verify_us: float) -> None:
        """`n_tokens` were computed; no forward pass is running."""
        record, self._drafted = self._drafted, None
        if record and not record.n_draft:
            self._drafter.accept(0)
        if record is None and n_tokens > 1:
            if self._hook:
                self._hook.after_prompt()
            return
        record = record or StepRecord(step=self._n_steps, n_tokens=n_tokens)
        record.verify_us = verify_us
        self._n_steps += 1
        if record.n_draft:
            self._pending = record
        else:
            self._finish(record)

    def _finish(self, record: StepRecord) -> None:
        if self._hook:
            self._hook.after_step(record)
        self.totals.add([record])


def _n_alike(a: TokenIds, b: TokenIds) -> int:
    """How many tokens they begin with alike."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n


def _us_since(start_ns: int) -> float:
    return (time.perf_counter_ns() - start_ns) / 1e3
