"""One model, loaded and ready to compute: options in; a model, a context and unless stock the split out."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

from pyspac.engine.step import StepRecord
from pyspac.forward.loading import Loading, Progress
from pyspac.forward.options import ForwardOptions

if TYPE_CHECKING:
    from pyspac.engine.devices import Device
    from pyspac.forward.context import Context
    from pyspac.forward.model import Model
    from pyspac.forward.split import Split


class Runner:
    """Everything that it opens it closes, in the right order."""

    def __init__(self, options: ForwardOptions, progress: Progress = lambda what, fraction: True) -> None:
        """Raises a PyspacError; bad input is found before anything is loaded."""
        self.loading = Loading.of(options)
        self.options = self.loading.options
        self.split: Split | None = None
        self._stack = ExitStack()
        with ExitStack() as stack:  # closes what is open if the rest fails
            self._open(stack, progress)
            self._stack = stack.pop_all()

    @property
    def device(self) -> Device:
        return self.loading.device

    @property
    def n_threads(self) -> int:
        return self.loading.n_threads

    def _open(self, stack: ExitStack, progress: Progress) -> None:
        from pyspac.forward import log, model  # they load libllama
        from pyspac.forward.context import Context

        log.set_verbose(self.options.verbose)
        self.model: Model = stack.enter_context(
            model.Model(self.loading.model_params(), lambda fraction: progress("model", fraction))
        )
        params = self.loading.context_params()
        self.context: Context = stack.enter_context(Context(self.model, params))
        self.draft: Context | None = None
        if self.options.draft is not None:  # before the engine: the slots take what it leaves of the device
            self.draft = self.loading.open_draft(stack, progress, params.n_ctx)
        if not self.options.stock:
            from pyspac.forward.split import Split  # loads the engine

            self.split = stack.enter_context(
                Split(self.context.ptr, self.device, self.options, self.loading.ram_bytes)
            )
            self.context.why_failed = self.split.why_failed

    def after_prompt(self) -> None:
        """The context holds a new text: the scheduler has its turn."""
        if self.split is not None:
            self.split.after_prompt()

    def after_step(self, n_tokens: int, n_sequences: int = 1) -> None:
        """Every sequence went on by so many tokens, all but the first of them drafts: the same."""
        if self.split is not None:
            n_draft = n_tokens - 1
            n = n_tokens * n_sequences
            self.split.after_step(StepRecord(n_draft=n_draft, n_accepted=n_draft, n_tokens=n))

    def end_forward(self) -> None:
        """A pass was taken back: nothing is learned from it."""
        if self.split is not None:
            self.split.engine.end_forward()

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()
