"""The decode loop: prompt processing, then steps of draft + verify until the end.

In: a context, the prompt's token ids, a sampler, a drafter. Out: a `Generation`. One step drafts n tokens,
verifies them in one batch of 1 + n tokens (the last token and the drafts), emits the accepted ones and one
more, and takes the rejected ones back. Between steps a `StepHook` runs the engine's and the scheduler's part.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from pyspac.engine.step import StepRecord
from pyspac.errors import PyspacError
from pyspac.generate.drafting import Drafter, NoDrafter
from pyspac.generate.metrics import Metrics
from pyspac.generate.sampling import Sampler

if TYPE_CHECKING:
    from pyspac.generate.llama import Context

StopReason = Literal["eog", "length", "context", "interrupted"]
UNTIL_EOG = -1


class PromptError(PyspacError):
    """The prompt cannot be processed: empty, or longer than the context."""

    exit_code = 2


def check_prompt(prompt: Sequence[int], n_ctx: int, room_advice: str = "raise -c") -> None:
    """Raise PromptError if nothing could be generated after it; `room_advice`: as `Context` has it."""
    if not prompt:
        raise PromptError(
            "the prompt is empty and the model has no token to begin with; give a text with -p or -f"
        )
    if len(prompt) >= n_ctx:
        raise PromptError(
            f"the prompt has {len(prompt)} tokens and the context only {n_ctx}: shorten it ({room_advice})"
        )


class StepHook(Protocol):
    """What runs while no forward pass is running."""

    def n_draft_limit(self) -> int | None:
        """The longest draft wanted in the next step; None: no opinion."""

    def after_prompt(self) -> None:
        """The prompt is processed."""

    def after_step(self, record: StepRecord) -> None:
        """A step is done; the hook may add what it knows of it."""

    def look_ahead(self, tokens: Sequence[int]) -> None:
        """The next forward computes these tokens, as far as they are known: told when another one is."""


@dataclass(slots=True)
class Generation:
    """What came out; the end-of-generation token is not part of it."""

    token_ids: list[int] = field(default_factory=list)
    stop_reason: StopReason = "length"
    metrics: Metrics = field(default_factory=Metrics)


class Interrupt:
    """True once Ctrl-C was pressed; a second Ctrl-C raises KeyboardInterrupt at once."""

    def __init__(self) -> None:
        self.is_set = False

    def __bool__(self) -> bool:
        return self.is_set

    def _handle(self, _signum: int, _frame: object) -> None:
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True

    @classmethod
    @contextmanager
    def watch(cls) -> Iterator[Interrupt]:
        """Catch SIGINT inside the block. Main thread only."""
        interrupt = cls()
        previous = signal.signal(signal.SIGINT, interrupt._handle)
        try:
            yield interrupt
        finally:
            signal.signal(signal.SIGINT, previous)


class DecodeLoop:
    """One generation; make a new one for each. What `context` and the drafter hold must begin the prompt."""

    def __init__(
        self,
        context: Context,
        sampler: Sampler,
        drafter: Drafter | None = None,
        *,
        n_draft_max: int = 0,
        hook: StepHook | None = None,
        on_token: Callable[[int], None] = lambda token: None,
        interrupt: Interrupt | None = None,
    ) -> None:
        """`on_token` gets each token as it is emitted, also from inside a step that emits several."""
        assert n_draft_max < context.params.n_outputs_max
        self.context = context
        self.sampler = sampler
        self.drafter = drafter or NoDrafter()
        self.n_draft_max = n_draft_max
        self.hook = hook
        self.on_token = on_token
        self.interrupt = Interrupt() if interrupt is None else interrupt  # an unset one is false
        self.result = Generation()
        self.sequence: list[int] = []  # prompt and output; all but the last are in the context's cache

    def run(self, prompt: Sequence[int], n_predict: int = UNTIL_EOG) -> Generation:
        """Generate until the end token, `n_predict` tokens, a full context, or Ctrl-C.

        `prompt`: one that passes `check_prompt`.
        """
        self.result.metrics.start_s = time.perf_counter()
        self.sequence = list(prompt)
        reason = self._process_prompt(prompt, n_predict)
        while reason is None:
            reason = self._why_stop(n_predict) or self._step(self._n_draft(n_predict))
        self.result.stop_reason = reason
        return self.result

    def _process_prompt(self, prompt: Sequence[int], n_predict: int) -> StopReason | None:
        n_ubatch, n_cached = self.context.params.n_ubatch, self.context.n_past
        for first in range(n_cached, len(prompt), n_ubatch):
            if self.interrupt:
                return "interrupted"
            piece = prompt[first : first + n_ubatch]
            logits = self.context.decode(piece, 1)
            if self.n_draft_max:
                self.drafter.read(piece, first)
        self.result.metrics.n_prompt, self.result.metrics.n_cached = len(prompt), n_cached
        if self.interrupt:
            return "interrupted"
        if n_predict == 0:
            return "length"
        token, _ = self.sampler.sample(logits[0])
        if self.n_draft_max:
            self.drafter.prepare(prompt)
        if self.hook:
            self.hook.after_prompt()
        return self._look_ahead_unless(self._emit([token]))

    def _why_stop(self, n_predict: int) -> StopReason | None:
        if self.interrupt:
            return "interrupted"
        if 0 <= n_predict <= len(self.result.token_ids):
            return "length"
        if len(self.sequence) > self.context.n_ctx:
            return "context"
        return None

    def _n_draft(self, n_predict: int) -> int:
        """The longest draft for this step: settings, hook, the rest of the output and of the context."""
        limits = [self.n_draft_max, self.context.n_ctx - len(self.sequence)]
        if n_predict >= 0:
            limits.append(n_predict - len(self.result.token_ids) - 1)
        if self.hook and (limit := self.hook.n_draft_limit()) is not None:
            limits.append(limit)
        return max(0, min(limits))

    def _step(self, n_draft_max: int) -> StopReason | None:
        """Draft, verify, emit, take back; one step record."""
        t0 = _now_us()
        draft = self.drafter.draft(self.sequence, n_draft_max)
        if self.hook and draft.tokens:
            self.hook.look_ahead([self.sequence[-1], *draft.tokens])
        t1 = _now_us()
        n_past = self.context.n_past
        logits = self.drafter.verify(self.context, [self.sequence[-1], *draft.tokens])
        t2 = _now_us()
        verdict = self.sampler.verify(logits, draft.tokens, draft.probs)
        t3 = _now_us()
        self.context.rollback(n_past + 1 + verdict.n_accepted)
        self.drafter.accept(verdict.n_accepted)
        t4 = _now_us()
        reason = self._emit(verdict.tokens)
        self._finish_step(
            StepRecord(
                step=len(self.result.metrics.steps),
                n_draft=len(draft.tokens),
                n_accepted=verdict.n_accepted,
                n_tokens=len(logits) + draft.n_masks,
                n_masks=draft.n_masks,
                n_matched=draft.n_matched,
                draft_us=t1 - t0,
                verify_us=t2 - t1,
                sample_us=t3 - t2,
                process_us=t4 - t3,
            )
        )
        return self._look_ahead_unless(reason)

    def _look_ahead_unless(self, reason: StopReason | None) -> StopReason | None:
        """Tell the hook what the next forward begins with, if there is one."""
        if self.hook and reason is None:
            self.hook.look_ahead(self.sequence[-1:])
        return reason

    def _finish_step(self, record: StepRecord) -> None:
        if self.hook:
            self.hook.after_step(record)
        self.result.metrics.steps.append(record)

    def _emit(self, tokens: Sequence[int]) -> StopReason | None:
        """Append `tokens` up to the end token."""
        vocab = self.context.model.vocab
        n_before = len(self.result.token_ids)
        reason: StopReason | None = None
        for token in tokens:
            if vocab.is_eog(token):
                reason = "eog"
                break
            self.result.token_ids.append(token)
            self.sequence.append(token)
            self.on_token(token)
        self.result.metrics.mark_tokens(len(self.result.token_ids) - n_before, time.perf_counter())
        return reason


def _now_us() -> int:
    return time.perf_counter_ns() // 1000
