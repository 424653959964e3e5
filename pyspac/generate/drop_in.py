"""`pyspac.Llama`: llama-cpp-python's `Llama` with the engine attached.

In: its arguments, and `cache`, `ram`, `device`, `draft_model`, `mtp` and `draft_max` of ours. Out: the same
interface; all answers are made by llama-cpp-python's own code. Models are loaded as `pyspac run` loads them,
and after each eval the scheduler has its turn.
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

from pyspac.engine.attached import not_by_environment
from pyspac.engine.params import EngineParams
from pyspac.generate import drop_in_values as values
from pyspac.generate import llama
from pyspac.generate.drafting import Drafter, ModelDrafter
from pyspac.generate.drop_in_errors import DecodeError, InputError, as_input_error
from pyspac.generate.drop_in_fields import Closed, Fields
from pyspac.generate.drop_in_masks import MaskedEvals, check_alone, n_draft_that_fits
from pyspac.generate.drop_in_steps import DropInSteps, ForeignDrafter
from pyspac.generate.drop_in_turns import Turns, in_turn
from pyspac.generate.libllama import LlamaError
from pyspac.generate.loading import Loading
from pyspac.generate.options import CacheSize, RunOptions
from pyspac.generate.report import engine_dict, run_as_dict
from pyspac.generate.sampling import Sampler, SamplingParams
from pyspac.generate.speculation_hook import new_speculation
from pyspac.model.checks import check_model_file
from pyspac.model.geometry import read_geometry

import llama_cpp  # isort: skip  # after ours, which say where libllama is
from llama_cpp.llama_speculative import LlamaDraftModel

if TYPE_CHECKING:
    from pyspac.generate.split import Split

DraftModel: TypeAlias = LlamaDraftModel | str | os.PathLike[str]


_KNOWN: Final = frozenset(inspect.signature(llama_cpp.Llama.__init__).parameters)


class Llama(llama_cpp.Llama):  # type: ignore[misc]  # llama-cpp-python has no types
    """`llama_cpp.Llama`, run by pyspac. Close it, or use it as a context manager.

    Making one: `_plan` checks everything and finds the device; llama_cpp.Llama fills in `model_params` and
    loads the model, fills in `context_params` and makes the context, both with what `_ours` has on top
    (`Fields`); `_attach` brings the engine and who drafts.
    """

    model_params = Fields()
    context_params = Fields()
    _lora_adapter: Any

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        cache: str | int | list[str | int] = "auto",
        ram: str | int | None = None,
        device: str | list[str] | None = "auto",
        rpc: str | list[str] | None = None,
        draft_model: DraftModel | None = None,
        mtp: str | os.PathLike[str] | None = None,
        draft_max: int | None = None,
        host_kernels: str = EngineParams().host_kernels,
        stock: bool = False,
        n_gpu_layers: int | None = None,
        n_threads: int | None = None,
        n_threads_batch: int | None = None,
        verbose: bool = True,
        **kwargs: Any,
    ) -> None:
        """Everything in `kwargs` is llama_cpp.Llama's.

        `cache`, `ram`, `device`, `rpc`, `host_kernels`, `draft_max` and `stock` mean what they mean for
        `pyspac run` (`--cache` and so on); `cache`, `device` and `rpc` may be lists. `draft_model`: the file
        of a small model, or an object of llama-cpp-python's. `mtp`: the file of an adapter with mask tokens,
        by which the model drafts for itself. `n_gpu_layers`: None: all of them; without a GPU there is
        nothing to put layers on. `n_threads`: None: one per physical core. Raises InputError (a ValueError),
        EngineError, or what llama_cpp.Llama raises.
        """
        self._turns = Turns()
        self._stack = ExitStack()  # __del__ closes it, whatever fails
        values.check_known(kwargs, _KNOWN)
        kwargs = values.with_shares(kwargs)
        self._given = {
            "cache": values.text_of_sizes("cache", cache), "ram": None if ram is None else str(ram),
            "device": values.text_of_names("device", "auto" if device is None else device),
            "draft_model": draft_model, "mtp": mtp, "draft_max": draft_max, "host_kernels": host_kernels,
            "stock": stock, "rpc": None if rpc is None else values.text_of_names("rpc", rpc),
            "n_gpu_layers": n_gpu_layers, "n_threads": n_threads, "n_threads_batch": n_threads_batch,
            "verbose": verbose, **kwargs,
        }  # fmt: skip
        self._ours: dict[str, dict[str, Any]] = {"model_params": {}, "context_params": {}}
        self._split: Split | None = None
        self._masks: MaskedEvals | None = None
        self._steps = DropInSteps(None)
        self._must_repeat = False
        model_path = os.fspath(model_path)
        self._loading = None if kwargs.get("vocab_only") else self._plan(model_path)
        llama.set_verbose(verbose)
        with not_by_environment():
            super().__init__(model_path, verbose=verbose, **self._base_arguments(kwargs))
        try:
            with as_input_error():
                self._attach()
        except BaseException:
            self.close()
            raise

    def _plan(self, model_path: str) -> Loading:
        """How to load it. Raises InputError."""
        if not Path(model_path).exists():
            raise InputError(f"Model path does not exist: {model_path}; give the path of a GGUF file")
        lora = self._given.get("lora_path")
        with as_input_error():
            options = self._options(Path(model_path))
            if lora and not Path(lora).is_file():
                raise InputError(f"lora_path {lora}: there is no such file; check the path")
            values.check_sizes(self._given)
            loading = self._loading_of(options)
            values.check_context(self._given, loading)
            return loading

    def _options(self, model: Path) -> RunOptions:
        given, draft, mtp = self._given, self._given["draft_model"], self._given["mtp"]
        if mtp is not None:
            embeds, has_lora = bool(given.get("embedding")), bool(given.get("lora_path"))
            check_alone(has_lora=has_lora, embeds=embeds, has_draft=draft is not None)
        is_foreign = isinstance(draft, LlamaDraftModel)
        max_batch = EngineParams().max_batch
        return RunOptions(
            model=model, draft=None if is_foreign else values.draft_file(draft),
            mtp=values.file_of("mtp", mtp), spec_type="ngram" if is_foreign else None,
            draft_max=max_batch - 1 if is_foreign and given["draft_max"] is None else given["draft_max"],
            cache=CacheSize(text=given["cache"]), ram=given["ram"], device=given["device"],
            host_kernels=given["host_kernels"], rpc=given["rpc"],
            stock=given["stock"], repack=given["stock"], n_threads=given["n_threads"],
            verbose=given["verbose"],
        )  # fmt: skip

    def _loading_of(self, options: RunOptions) -> Loading:
        """A dense model is llama.cpp's alone where there is a GPU, unless the device was named."""
        from pyspac.engine.devices import choose_device

        is_left_to_us = options.device == "auto" and (options.rpc or not choose_device("auto").is_cpu)
        if is_left_to_us and not read_geometry(check_model_file(options.model)).is_moe:
            options = replace(options, stock=True, repack=True)
        layers = self._given["n_gpu_layers"], self._given.get("tensor_split")
        return Loading.of(options).with_layers(*layers)

    def _base_arguments(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Of llama_cpp.Llama: what was given to us, with our defaults."""
        given, loading = self._given, self._loading
        if loading is None:
            named = ("n_gpu_layers", "n_threads", "n_threads_batch")
            return kwargs | {name: given[name] for name in named if given[name] is not None}
        self._ours["model_params"] = self._model_fields(loading)
        if loading.options.effective_draft_max:
            self._ours["context_params"] = {"n_rs_seq": loading.options.effective_draft_max}
        if loading.options.uses_masks:  # a group of masks for each draft, and one for the token before them
            groups = {"n_seq_max": 2 + loading.options.effective_draft_max, "kv_unified": True}
            self._ours["context_params"] |= groups
        defaults = {"op_offload": not loading.device.is_cpu}
        n_threads = given["n_threads"] or loading.n_threads
        return defaults | kwargs | {
            "n_threads": n_threads, "n_threads_batch": given["n_threads_batch"] or n_threads,
        }  # fmt: skip

    def _model_fields(self, loading: Loading) -> dict[str, Any]:
        self._kept: list[Any] = []  # what llama.cpp reads while it loads
        fields = llama.model_fields(loading.model_params(), self._kept)
        if fields["load_mode"] == llama.LOAD_MODE_AUTO or self._given.get("use_mlock"):
            del fields["load_mode"]  # the caller's
        return fields

    def _attach(self) -> None:
        """The engine, and who drafts."""
        loading = self._loading
        if loading is None:
            return
        if self._given.get("lora_path") and not self._lora_adapter:  # null, which llama_cpp.Llama lets pass
            self._lora_adapter = None
            raise InputError(
                f"lora_path {self._given['lora_path']}: this file is no LoRA adapter of this model; give "
                "one that was trained on it and converted to GGUF"
            )
        options = loading.options
        drafter = self._open_drafter(loading)  # first: the slots take what it leaves of the device
        if not options.stock:
            from pyspac.generate.split import Split  # loads the engine

            self._split = self._stack.enter_context(Split(self.ctx, loading.device, options, loading.ram_mib))
        n_draft_max = min(options.effective_draft_max, self.n_batch - 1)
        if options.uses_masks:
            drafter = self._open_masks(loading)
            n_draft_max = n_draft_that_fits(n_draft_max, self.n_batch)
        is_foreign = isinstance(drafter, ForeignDrafter)
        speculation = None if is_foreign else new_speculation(options, n_draft_max)
        self._steps = DropInSteps(
            self._split,
            drafter,
            speculation,
            n_draft_max=n_draft_max,
            n_ctx=min(self._n_ctx, len(self.input_ids)),  # llama.cpp rounds its own up
        )
        if drafter is not None:
            is_recurrent = bool(self._is_recurrent or self._is_hybrid)
            llama.check_can_rollback(options.model, is_recurrent, self.ctx, n_draft_max)
            self.draft_model = self._steps

    def _open_drafter(self, loading: Loading) -> Drafter | None:
        """Greedy: a drafted token is accepted where the target draws it."""
        draft = self._given["draft_model"]
        if draft is None:
            return None
        if isinstance(draft, LlamaDraftModel):
            return ForeignDrafter(draft)
        model = loading.open_draft_model(Path(draft), self._stack, lambda what, fraction: True)
        context = llama.Context(model, loading.context_params(n_ctx=self._n_ctx))
        return ModelDrafter(self._stack.enter_context(context), Sampler(SamplingParams()))

    def _open_masks(self, loading: Loading) -> Drafter:
        """The model itself: the engine is there by now."""
        pointers = (self._model.model, self.ctx)
        self._masks = MaskedEvals(loading, pointers, self._n_ctx, self._stack, self._split)
        return self._masks.drafter

    # ---- what llama_cpp.Llama calls

    def detokenize(self, tokens: Any, *args: Any, **kwargs: Any) -> bytes:
        """As llama_cpp.Llama."""
        self._check_open()
        values.check_tokens(tokens, self._n_vocab)
        return bytes(super().detokenize(tokens, *args, **kwargs))

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """As llama_cpp.Llama."""
        self._check_open()
        return list(super().tokenize(text, add_bos, special))

    create_completion = in_turn(llama_cpp.Llama.create_completion)
    save_state = in_turn(llama_cpp.Llama.save_state)
    reset = in_turn(llama_cpp.Llama.reset)

    @in_turn
    def generate(self, tokens: Any, *args: Any, **kwargs: Any) -> Any:
        """As llama_cpp.Llama: a generator of tokens."""
        self._check_open()
        tokens = list(tokens)
        has_more = self.n_tokens > 0 and not kwargs.get("reset", True)
        values.check_prompt(tokens, self._n_vocab, has_more=has_more)
        values.check_sampling(kwargs)
        self._steps.begin(must_repeat=self._must_repeat and kwargs.get("temp", 1.0) > 0)
        return self._turns.text(super().generate(tokens, *args, **kwargs))

    def _create_completion(self, *args: Any, seed: int | None = None, **kwargs: Any) -> Any:
        """As llama_cpp.Llama; with a seed the same text comes again, so drafts are all of one length."""
        self._check_open()
        values.check_sampling(kwargs)
        prompt, has_bos = kwargs["prompt"], bool(self._model.add_bos_token())
        has_more = kwargs.get("suffix") is not None or (isinstance(prompt, str) and has_bos)
        values.check_prompt(prompt, self._n_vocab, has_more=has_more)
        self._must_repeat = seed is not None or self._given.get("seed") is not None
        return super()._create_completion(*args, seed=seed, **kwargs)

    def create_chat_completion(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
        """As llama_cpp.Llama."""
        self._check_open()
        values.check_messages(messages)
        return super().create_chat_completion(messages, *args, **kwargs)

    @in_turn
    def eval(self, tokens: Any) -> None:
        """As llama_cpp.Llama; of drafts the logits of all are there, without `logits_all`."""
        self._check_open()
        values.check_tokens(tokens, self._n_vocab)
        start_ns = time.perf_counter_ns()
        with self._says_why():
            if self._masks and tokens:
                self._masks.before_eval(self.n_tokens)
            if self._masks and self._steps.n_masks and len(tokens) == 1 + self._steps.n_drafted:
                self._eval_masked(self._masks, list(tokens))
            elif self._steps.n_drafted and not self._logits_all:
                self._eval_drafts(list(tokens))
            else:
                super().eval(tokens)
        llama_cpp.llama_synchronize(self.ctx)
        self._steps.after_eval(len(tokens), (time.perf_counter_ns() - start_ns) / 1e3)

    @in_turn
    def sample(self, *args: Any, idx: int | None = None, **kwargs: Any) -> int:
        """As llama_cpp.Llama, which counts a batch's rows from the end; there are the masks."""
        if self._masks and self._masks.first is not None:
            at = self.n_tokens - 1 if idx is None else idx
            idx = at - self._masks.first + self.n_tokens  # a row from the beginning
        return int(super().sample(*args, idx=idx, **kwargs))

    @in_turn
    def load_state(self, state: Any) -> None:
        """As llama_cpp.Llama."""
        super().load_state(state)
        if self._masks:
            self._masks.forget()

    @in_turn
    def embed(self, *args: Any, **kwargs: Any) -> Any:
        """As llama_cpp.Llama."""
        self._check_open()
        with self._says_why():
            return super().embed(*args, **kwargs)

    @contextmanager
    def _says_why(self) -> Iterator[None]:
        """Of a batch that failed llama_cpp.Llama knows a number alone; the engine may know more."""
        try:
            yield
        except RuntimeError as error:
            if self._split and (why := self._split.why_failed()):
                raise DecodeError(f"computing after token {self.n_tokens} failed: {why}") from error
            raise

    def _eval_drafts(self, tokens: list[int]) -> None:
        """llama_cpp.Llama would keep their logits, in a table with room for one batch: longer texts fail."""
        self._ctx.kv_cache_seq_rm(-1, self.n_tokens, -1)
        self._batch.set_batch(batch=tokens, n_past=self.n_tokens, logits_all=True)
        self._ctx.decode(self._batch)
        self.input_ids[self.n_tokens : self.n_tokens + len(tokens)] = tokens
        self.n_tokens += len(tokens)
        self._requires_eval = False

    def _eval_masked(self, masks: MaskedEvals, tokens: list[int]) -> None:
        """With masks in the same batch, behind what llama_cpp.Llama knows of."""
        n_past, n = self.n_tokens, len(tokens)
        self._ctx.kv_cache_seq_rm(-1, n_past, -1)
        try:
            logits = masks.decode(tokens, n_past)
        except LlamaError as error:
            raise DecodeError(str(error)) from error
        self.input_ids[n_past : n_past + n] = tokens
        if self._logits_all:
            self.scores[n_past : n_past + n] = logits
        self.n_tokens += n
        self._requires_eval = False

    def close(self) -> None:
        """As llama_cpp.Llama; what is asked of it afterwards is an error."""
        if "_stack" in vars(self):  # else nothing was opened
            with self._turns.lock:
                super().close()
                self._ctx = self._model = self._batch = Closed()

    def _check_open(self) -> None:
        _ = self._ctx.ctx

    # ---- ours

    def stats(self) -> dict[str, Any]:
        """What happened since the model was loaded: experts, layers, drafts, as in `pyspac run --json`."""
        self._check_open()
        if self._loading is None:
            return {}
        return {
            **run_as_dict(self._loading.options, self._loading.device, self._split),
            **self._steps.totals.to_dict(),
            **engine_dict(self._split),
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **self._given}


def replace_llama_cpp(**defaults: Any) -> None:
    """Let libraries that import `Llama` from `llama_cpp` after this get pyspac's.

    `defaults`: arguments of `Llama` that such a library does not give, or gives as None.
    """

    class WithDefaults(Llama):
        def __init__(self, model_path: str | os.PathLike[str], **kwargs: Any) -> None:
            given = {name: value for name, value in kwargs.items() if value is not None}
            super().__init__(model_path, **kwargs | defaults | given)

    llama_cpp.Llama = WithDefaults if defaults else Llama
