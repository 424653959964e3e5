"""A run from options to text: check, load, attach, generate, close.

In: `RunOptions`. Out: a `Session` that is ready to generate. Everything that it opens it closes, in the right
order.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from pyspac.engine.ahead import DRAFT_GATE
from pyspac.engine.cpus import default_n_threads, kept_within
from pyspac.engine.devices import Device, choose_device, fits_memory
from pyspac.engine.values import read_cpu_range
from pyspac.errors import ModelError
from pyspac.generate import spec_types
from pyspac.generate.decode import UNTIL_EOG, DecodeLoop, Generation, Interrupt, check_prompt
from pyspac.generate.drafting import Drafter, ModelDrafter, NgramDrafter, NoDrafter
from pyspac.generate.memory_tier import bytes_in_memory, choose_ram_mib
from pyspac.generate.options import RunOptions
from pyspac.generate.preflight import Preflight, check_run, has_own_kernels
from pyspac.generate.sampling import Sampler, SamplingParams
from pyspac.generate.speculation_hook import SpeculationHook
from pyspac.speculation.manager import Speculation

if TYPE_CHECKING:
    from pyspac.generate.llama import Context, Model, ModelParams, TextStream
    from pyspac.generate.split import Split

Progress = Callable[[str, float], bool]  # (what is loading, 0.0 .. 1.0); False stops the loading


class Session:
    """Models, contexts, drafter and (unless stock) the split; what two prompts begin with is kept."""

    def __init__(self, options: RunOptions, progress: Progress | None = None) -> None:
        """Raises a PyspacError; bad input is found before anything is loaded."""
        from pyspac.engine.limits import check_n_threads  # loads the native library, as the rest does anyway

        if options.n_threads is not None:
            check_n_threads("-t", options.n_threads, 1)
        self.device: Device = choose_device(options.device, options.rpc)
        options = options.on(self.device)
        self.preflight: Preflight = check_run(options, self.device)
        self.options = self._runnable(options)
        self.ram_mib = self._choose_ram_mib()
        self.cpus = None if options.cpu_range is None else read_cpu_range(options.cpu_range)
        self.n_threads = options.n_threads or default_n_threads(self.cpus)
        self.sampler = Sampler(options.sampling)
        self.split: Split | None = None
        self.speculation = self._new_speculation()
        self._held: list[int] = []  # tokens in the context
        self._stack = ExitStack()
        with ExitStack() as stack:  # closes what is open if the rest fails
            self._open(stack, progress or (lambda what, fraction: True))
            self._stack = stack.pop_all()

    def _runnable(self, options: RunOptions) -> RunOptions:
        """Without a device, and without kernels of the engine for this model, llama.cpp's are the best."""
        self.lacks_kernels = (
            options.is_host_only and not options.stock and not has_own_kernels(self.preflight.header)
        )
        return replace(options, stock=True, repack=True) if self.lacks_kernels else options

    def _open(self, stack: ExitStack, progress: Progress) -> None:
        from pyspac.generate import llama  # loads libllama

        if self.cpus is not None:
            stack.enter_context(kept_within(self.cpus))  # before libllama makes its threads
        llama.set_verbose(self.options.verbose)
        self.model: Model = stack.enter_context(
            llama.Model(self._model_params(), lambda fraction: progress("model", fraction))
        )
        own_drafter = self._open_own_drafter(stack, progress)
        self.context: Context = stack.enter_context(
            self._open_context(self.model, self.options.effective_draft_max)
        )
        self.drafter: Drafter = own_drafter or self._open_library_drafter(stack, progress)
        if not self.options.stock:
            from pyspac.generate.library_drafter import LibraryDrafter
            from pyspac.generate.split import Split  # loads the engine

            self.split = stack.enter_context(Split(self.context, self.device, self.options, self.ram_mib))
            if DRAFT_GATE in self.options.predict and isinstance(self.drafter, ModelDrafter | LibraryDrafter):
                self.split.watch_draft(self.drafter.context)

    def _model_params(self) -> ModelParams:
        """The target's: with a device, all layers on it but the routed experts, which stay on the host.

        Weights keep the file's layout unless stock may repack them, so that stock and split compute the
        same bits. Without a device they are copied into memory with huge pages, if there is room for it
        beside the file's pages.
        """
        from pyspac.generate.llama import (
            ALL_TENSORS,
            EXPERT_TENSORS,
            LAZY_MODE_AUTO,
            LAZY_MODE_EXPERTS,
            LOAD_MODE_AUTO,
            LOAD_MODE_NONE,
            ModelParams,
        )

        has_own_memory = self._fits_own_memory()  # free memory changes: ask once
        return ModelParams(
            path=self.options.model,
            n_gpu_layers=self._n_gpu_layers(),
            devices=self._device_handles(),
            buft=self._buffer_type(has_own_memory),
            buft_tensors=ALL_TENSORS if has_own_memory else EXPERT_TENSORS,
            use_extra_bufts=self.options.repack,
            lazy_mode=LAZY_MODE_AUTO if self.ram_mib is None else LAZY_MODE_EXPERTS,
            load_mode=LOAD_MODE_AUTO if self.device.is_cpu and not has_own_memory else LOAD_MODE_NONE,
            load_heads=self._uses_head() and self.options.draft is None,
        )

    def _uses_head(self) -> bool:
        return spec_types.DRAFT_MTP in spec_types.names_of(self.options.effective_spec_type)

    def _fits_own_memory(self) -> bool:
        """Whether weights are copied out of the file; else they stay mapped, and may exceed memory."""
        is_wanted = self.options.is_host_only and not self.options.stock
        return is_wanted and fits_memory(bytes_in_memory(self.preflight.geometry, self.ram_mib))

    def _choose_ram_mib(self) -> int | None:
        """Memory for experts that stay on disk; None: all are loaded."""
        options = self.options
        can = options.is_host_only and not options.stock
        return choose_ram_mib(options.ram, self.preflight.geometry) if can else None

    def _buffer_type(self, has_own_memory: bool) -> int | None:
        from pyspac.engine import engine

        if has_own_memory:
            return engine.host_buffer_type()
        return None if self.device.is_cpu else engine.cpu_buffer_type()

    def _n_gpu_layers(self) -> int:
        from pyspac.generate.llama import ALL_LAYERS

        if self.device.is_cpu:
            return 0
        return ALL_LAYERS if self.options.n_gpu_layers is None else self.options.n_gpu_layers

    def _device_handles(self) -> tuple[int, ...]:
        return () if self.device.handle is None else (self.device.handle,)

    def _open_context(self, model: Model, n_draft_max: int) -> Context:
        from pyspac.generate.llama import Context, ContextParams

        return Context(
            model,
            ContextParams(
                n_ctx=self.preflight.n_ctx,
                n_outputs_max=1 + n_draft_max,
                n_rollback_max=n_draft_max,
                n_threads=self.n_threads,
                op_offload=not self.device.is_cpu,
            ),
        )

    def _open_own_drafter(self, stack: ExitStack, progress: Progress) -> Drafter | None:
        """None: llama.cpp's library drafts, which needs the target's context."""
        match self.options.effective_spec_type:
            case spec_types.NONE:
                return NoDrafter()
            case spec_types.NGRAM:
                return NgramDrafter()
            case spec_types.DRAFT:
                context = stack.enter_context(
                    self._open_context(self._open_draft_model(stack, progress), n_draft_max=0)
                )
                return ModelDrafter(context, Sampler(self._draft_sampling()), self.options.draft_p_min)
        return None

    def _open_library_drafter(self, stack: ExitStack, progress: Progress) -> Drafter:
        from pyspac.generate.library_drafter import open_library_drafter

        draft = None if self.options.draft is None else self._open_draft_model(stack, progress)
        return open_library_drafter(self.options, self.context, draft, stack)

    def _open_draft_model(self, stack: ExitStack, progress: Progress) -> Model:
        """On the same device, and never with an engine."""
        from pyspac.generate.llama import ALL_LAYERS, Model, ModelParams

        path = self.options.draft
        assert path is not None
        params = ModelParams(
            path=path,
            n_gpu_layers=0 if self.device.is_cpu else ALL_LAYERS,
            devices=self._device_handles(),
            load_heads=self._uses_head(),
        )
        model = stack.enter_context(Model(params, lambda fraction: progress("draft model", fraction)))
        if model.is_recurrent and spec_types.reads_like_target(self.options.effective_spec_type):
            raise ModelError(
                f"{path}: a draft model with recurrent layers cannot take back rejected tokens; "
                "use one without, or --spec-type ngram"
            )
        return model

    def _draft_sampling(self) -> SamplingParams:
        """The target's, with a seed of its own that follows from the target's."""
        return replace(self.options.sampling, seed=self.sampler.seed + 1)

    def _new_speculation(self) -> Speculation | None:
        """None: the draft length is fixed."""
        if not self.options.has_controller:
            return None
        return Speculation(self.options.controller, n_draft_max=self.options.effective_draft_max)

    def _speculation_hook(self) -> SpeculationHook | None:
        if self.speculation is None:
            return None
        return SpeculationHook(self.speculation, self.drafter, self.split)

    def text_stream(self) -> TextStream:
        from pyspac.generate.llama import TextStream

        return TextStream(self.model.vocab)

    def tokenize(self, prompt: str) -> list[int]:
        return self.model.vocab.tokenize(prompt)

    def generate(
        self,
        prompt: list[int],
        on_token: Callable[[int], None] = lambda token: None,
        interrupt: Interrupt | None = None,
    ) -> Generation:
        """Generate after `prompt`; `on_token` gets each token as it comes."""
        check_prompt(prompt, self.context.n_ctx)  # before anything is taken back for it
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

    def _keep_prefix(self, prompt: list[int]) -> None:
        """Of what the context holds, only that with which `prompt` begins; its last token gives logits."""
        from pyspac.generate.llama import LlamaError

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
