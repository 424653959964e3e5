"""A run from options to text: check, load, attach, generate, close.

In: `RunOptions`. Out: a `Session` that is ready to generate. Everything that it opens it closes, in the right
order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from pyspac.engine.ahead import DRAFT_GATE
from pyspac.engine.cpus import kept_within
from pyspac.engine.devices import Device
from pyspac.errors import PyspacError
from pyspac.generate.decode import UNTIL_EOG, DecodeLoop, Generation, Interrupt, check_prompt
from pyspac.generate.drafting import Drafter, ModelDrafter, NoDrafter
from pyspac.generate.loading import Loading, Progress
from pyspac.generate.ngram_drafter import NgramDrafter
from pyspac.generate.options import RunOptions
from pyspac.generate.preflight import Preflight
from pyspac.generate.sampling import Sampler, SamplingParams
from pyspac.generate.speculation_hook import SpeculationHook, new_speculation
from pyspac.model import spec_types

if TYPE_CHECKING:
    from pyspac.generate.llama import Context, Model
    from pyspac.generate.split import Split
    from pyspac.generate.vocab import TextStream


class Session:
    """Models, contexts, drafter and (unless stock) the split; what two prompts begin with is kept."""

    def __init__(
        self, options: RunOptions, progress: Progress | None = None, loading: Loading | None = None
    ) -> None:
        """Raises a PyspacError; bad input is found before anything is loaded.

        `loading`: that of `options`, where it is known.
        """
        self.loading = loading or Loading.of(options)
        self.options = self.loading.options
        self.sampler = Sampler(options.sampling)
        self.split: Split | None = None
        self.speculation = new_speculation(self.options, self.options.effective_draft_max)
        self._held: list[int] = []  # tokens in the context
        self._stack = ExitStack()
        with ExitStack() as stack:  # closes what is open if the rest fails
            self._open(stack, progress or (lambda what, fraction: True))
            self._stack = stack.pop_all()

    @property
    def device(self) -> Device:
        return self.loading.device

    @property
    def preflight(self) -> Preflight:
        return self.loading.preflight

    @property
    def n_threads(self) -> int:
        return self.loading.n_threads

    @property
    def lacks_kernels(self) -> bool:
        """Whether llama.cpp's kernels compute, as the engine has none for this model here."""
        return self.loading.lacks_kernels

    def _open(self, stack: ExitStack, progress: Progress) -> None:
        from pyspac.generate import llama  # loads libllama

        if self.loading.cpus is not None:
            stack.enter_context(kept_within(self.loading.cpus))  # before libllama makes its threads
        llama.set_verbose(self.options.verbose)
        self.model: Model = stack.enter_context(
            llama.Model(self.loading.model_params(), lambda fraction: progress("model", fraction))
        )
        own_drafter = self._open_own_drafter(stack, progress)
        self.context: Context = stack.enter_context(
            self._open_context(self.model, self.options.effective_draft_max)
        )
        self.drafter: Drafter = own_drafter or self._open_late_drafter(stack, progress)
        if not self.options.stock:
            from pyspac.generate.library_drafter import LibraryDrafter
            from pyspac.generate.lora_drafter import LoraDrafter
            from pyspac.generate.split import Split  # loads the engine

            self.split = stack.enter_context(
                Split(self.context.ptr, self.device, self.options, self.loading.ram_mib)
            )
            self.context.why_failed = self.split.why_failed
            if DRAFT_GATE in self.options.predict and isinstance(self.drafter, ModelDrafter | LibraryDrafter):
                self.split.watch_draft(self.drafter.context)
            if self.options.uses_masks:
                assert isinstance(self.drafter, LoraDrafter)
                self.drafter.decoder.count_first = self.split.engine.count_first

    def _open_context(self, model: Model, n_draft_max: int) -> Context:
        from pyspac.generate.llama import Context

        return Context(model, self.loading.context_params(n_draft_max))

    def _open_own_drafter(self, stack: ExitStack, progress: Progress) -> Drafter | None:
        """None: who drafts needs the target's context."""
        match self.options.effective_spec_type:
            case spec_types.NONE:
                return NoDrafter()
            case spec_types.NGRAM:
                return NgramDrafter()
            case spec_types.DRAFT:
                assert self.options.draft is not None
                model = self.loading.open_draft_model(self.options.draft, stack, progress)
                context = stack.enter_context(self._open_context(model, n_draft_max=0))
                return ModelDrafter(context, Sampler(self._draft_sampling()), self.options.draft_p_min)
        return None

    def _open_late_drafter(self, stack: ExitStack, progress: Progress) -> Drafter:
        from pyspac.generate.library_drafter import open_library_drafter
        from pyspac.generate.lora_drafter import open_lora_drafter

        if self.options.uses_masks:
            assert self.options.mtp is not None
            assert self.preflight.adapter is not None
            return open_lora_drafter(self.options.mtp, self.preflight.adapter, self.context, stack)
        path = self.options.draft
        draft = None if path is None else self.loading.open_draft_model(path, stack, progress)
        return open_library_drafter(self.options, self.context, draft, stack)

    def _draft_sampling(self) -> SamplingParams:
        """The target's, with a seed of its own that follows from the target's."""
        return replace(self.options.sampling, seed=self.sampler.seed + 1)

    def _speculation_hook(self) -> SpeculationHook | None:
        if self.speculation is None:
            return None
        return SpeculationHook(self.speculation, self.drafter, self.split)

    def text_stream(self, tags: Sequence[str] = ()) -> TextStream:
        """`tags`: texts to show also where they are control tokens."""
        from pyspac.generate.vocab import TextStream

        return TextStream(self.model.vocab, tags)

    def tokenize(self, prompt: str) -> list[int]:
        return self.model.vocab.tokenize(prompt)

    def generate(
        self,
        prompt: list[int],
        on_token: Callable[[int], None] = lambda token: None,
        interrupt: Interrupt | None = None,
    ) -> Generation:
        """Generate after `prompt`; `on_token` gets each token as it comes. Raises PyspacError once closed."""
        if self.context.ptr is None:
            raise PyspacError("this session is closed; open another one")
        check_prompt(prompt, self.context.n_ctx, self.context.room_advice)  # before anything is taken back
        self._keep_prefix(prompt)
        hook = self._speculation_hook()
        loop = DecodeLoop(
            self.context,
            self.sampler,
            hook.drafter if hook else self.drafter,
            n_draft_max=self.options.effective_draft_max,
            hook=hook or self.split,
            on_token=on_token,
            interrupt=interrupt,
        )
        try:
            return loop.run(prompt, self.options.n_predict if self.options.n_predict >= 0 else UNTIL_EOG)
        finally:
            self._held = loop.sequence[: self.context.n_past]
            if hook:
                hook.finish()

    def _keep_prefix(self, prompt: list[int]) -> None:
        """Of what the context holds, only that with which `prompt` begins; its last token gives logits."""
        from pyspac.generate.libllama import LlamaError

        longest = min(len(self._held), self.context.n_past, max(0, len(prompt) - 1))
        n = next((i for i in range(longest) if self._held[i] != prompt[i]), longest)
        try:
            self.context.rollback(self.drafter.keep(n))
        except LlamaError:  # layers with a state cannot go back: all over again
            self.context.clear()
            self.drafter.keep(0)

    def set_sampling(self, sampling: SamplingParams) -> None:
        """Of the next generation, and of a draft model with it."""
        self.options = replace(self.options, sampling=sampling)
        self.sampler = Sampler(sampling)
        if isinstance(self.drafter, ModelDrafter):
            self.drafter.sampler = Sampler(self._draft_sampling())

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()
