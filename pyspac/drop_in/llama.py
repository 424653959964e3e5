"""`pyspac.Llama`: llama-cpp-python's `Llama` with the engine attached.

In: its arguments, and `cache`, `ram`, `device`, `draft_max` and so on of ours. Out: the same interface; all
answers are made by llama-cpp-python's own code. Models are loaded as `pyspac run` loads them, and a
scheduler decides in a thread on the engine's board.
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

from pyspac.drop_in import values
from pyspac.drop_in.errors import DecodeError, InputError, as_input_error
from pyspac.drop_in.fields import Closed, Fields
from pyspac.drop_in.small_model import SmallModel
from pyspac.drop_in.steps import CountedDrafts, Steps
from pyspac.drop_in.turns import Turns, in_turn
from pyspac.engine.attached import not_by_environment
from pyspac.engine.params import EngineParams
from pyspac.forward.context import check_can_rollback
from pyspac.forward.loading import Loading
from pyspac.forward.log import set_verbose
from pyspac.forward.model import LOAD_MODE_AUTO, model_fields
from pyspac.forward.options import CacheSize, ForwardOptions
from pyspac.model.checks import check_model_file
from pyspac.model.geometry import read_geometry
from pyspac.model.spec_types import DRAFT, NONE
from pyspac.scheduler.config import SchedulerConfig

import llama_cpp  # isort: skip  # after ours, which say where libllama is
from llama_cpp.llama_speculative import LlamaDraftModel

if TYPE_CHECKING:
    from pyspac.engine.engine import Engine
    from pyspac.server.attachment import Attachment

DraftModel: TypeAlias = LlamaDraftModel | str | os.PathLike[str]


_PARAMETERS: Final = inspect.signature(llama_cpp.Llama.__init__).parameters
_N_CTX: Final = _PARAMETERS["n_ctx"].default


class Llama(llama_cpp.Llama):  # type: ignore[misc]  # llama-cpp-python has no types
    """`llama_cpp.Llama`, run by pyspac. Close it, or use it as a context manager.

    Making one: `_plan` checks everything and finds the device; llama_cpp.Llama fills in `model_params` and
    loads the model, fills in `context_params` and makes the context, both with what `_ours` has on top
    (`Fields`); `_attach` brings the draft model, the engine and the scheduler.
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
        of a small model, or an object of llama-cpp-python's. `n_gpu_layers`: None: all of them; without a GPU
        there is nothing to put layers on. `n_threads`: None: one per physical core. Raises InputError (a
        ValueError), EngineError, or what llama_cpp.Llama raises.
        """
        self._turns = Turns()
        self._stack = ExitStack()  # __del__ closes it, whatever fails
        values.check_known(kwargs, _PARAMETERS.keys())
        kwargs = values.with_shares(kwargs)
        self._given = {
            "cache": values.text_of_sizes("cache", cache), "ram": None if ram is None else str(ram),
            "device": values.text_of_names("device", "auto" if device is None else device),
            "draft_model": draft_model, "draft_max": draft_max, "host_kernels": host_kernels,
            "stock": stock, "rpc": None if rpc is None else values.text_of_names("rpc", rpc),
            "n_gpu_layers": n_gpu_layers, "n_threads": n_threads, "n_threads_batch": n_threads_batch,
            "verbose": verbose, **kwargs,
        }  # fmt: skip
        self._ours: dict[str, dict[str, Any]] = {"model_params": {}, "context_params": {}}
        self._engine: Engine | None = None
        self._attachment: Attachment | None = None  # None: nothing is to be placed
        self._steps = Steps()
        with as_input_error():
            self._n_draft_max = values.n_draft_max(draft_model, draft_max)
        model_path = os.fspath(model_path)
        self._loading = None if kwargs.get("vocab_only") else self._plan(model_path)
        set_verbose(verbose)
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

    def _options(self, model: Path) -> ForwardOptions:
        given, draft = self._given, self._given["draft_model"]
        return ForwardOptions(
            model=model, draft=None if isinstance(draft, LlamaDraftModel) else values.draft_file(draft),
            cache=CacheSize(text=given["cache"]), ram=given["ram"], device=given["device"],
            host_kernels=given["host_kernels"], rpc=given["rpc"],
            stock=given["stock"], repack=given["stock"], n_threads=given["n_threads"],
            scheduler=SchedulerConfig(n_draft_max=self._n_draft_max), verbose=given["verbose"],
        )  # fmt: skip

    def _loading_of(self, options: ForwardOptions) -> Loading:
        """With a GPU, llama.cpp computes a dense model without the engine, unless the device was named."""
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
        if self._n_draft_max:
            self._ours["context_params"] = {"n_rs_seq": self._n_draft_max}
        n_ctx = values.padded_context(given.get("n_ctx", _N_CTX) or loading.preflight.geometry.n_ctx_train)
        n = min(loading.n_ubatch, n_ctx)
        defaults = {"op_offload": not loading.device.is_cpu, "n_batch": n, "n_ubatch": n}
        n_threads = given["n_threads"] or loading.n_threads
        return defaults | kwargs | {
            "n_ctx": n_ctx,
            "n_threads": n_threads, "n_threads_batch": given["n_threads_batch"] or n_threads,
        }  # fmt: skip

    def _model_fields(self, loading: Loading) -> dict[str, Any]:
        self._kept: list[Any] = []  # what llama.cpp reads while it loads
        fields = model_fields(loading.model_params(), self._kept)
        if fields["load_mode"] == LOAD_MODE_AUTO or self._given.get("use_mlock"):
            del fields["load_mode"]  # the caller's
        return fields

    def _attach(self) -> None:
        """The draft model first, as the slots take what it leaves of the device; then the engine."""
        loading = self._loading
        if loading is None:
            return
        if self._given.get("lora_path") and not self._lora_adapter:  # null, which llama_cpp.Llama lets pass
            self._lora_adapter = None
            raise InputError(
                f"lora_path {self._given['lora_path']}: this file is no LoRA adapter of this model; give "
                "one that was trained on it and converted to GGUF"
            )
        # for stats(): another thread may be closing the context
        self._n_ubatch = llama_cpp.llama_n_ubatch(self.ctx)
        draft = self._open_draft(loading)
        if not loading.options.stock:
            self._attach_engine(loading)
        if draft is not None:
            n_draft_max = min(self._n_draft_max, self.n_batch - 1)
            is_recurrent = bool(self._is_recurrent or self._is_hybrid)
            check_can_rollback(loading.options.model, is_recurrent, self.ctx, n_draft_max)
            self.draft_model = CountedDrafts(draft, self._steps, n_draft_max=n_draft_max, n_ctx=self._n_ctx)

    def _open_draft(self, loading: Loading) -> LlamaDraftModel | None:
        draft = self._given["draft_model"]
        if draft is None or isinstance(draft, LlamaDraftModel):
            return draft
        context = loading.open_draft(self._stack, lambda what, fraction: True, self._n_ctx)
        return SmallModel(context, self._n_draft_max)

    def _attach_engine(self, loading: Loading) -> None:
        """And where there are slots, a scheduler's thread, which ends before the engine does."""
        from pyspac.engine.engine import Engine  # loads it
        from pyspac.forward.split import engine_device
        from pyspac.server.options import AttachOptions
        from pyspac.talk.scheduling import scheduling

        options = loading.options
        params = options.engine_params(engine_device(loading.device, options), loading.ram_bytes)
        self._engine = self._stack.enter_context(Engine.attach(self.ctx, params))
        if not options.is_host_only:
            attach = AttachOptions(scheduler=options.scheduler, warm_start=False)
            self._attachment = self._stack.enter_context(scheduling(self._engine.board, attach))
            self._steps.board = self._engine.board

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
    load_state = in_turn(llama_cpp.Llama.load_state)
    reset = in_turn(llama_cpp.Llama.reset)

    @in_turn
    def sample(self, *args: Any, **kwargs: Any) -> Any:
        """As llama_cpp.Llama."""
        self._check_open()
        return super().sample(*args, **kwargs)

    @in_turn
    def generate(self, tokens: Any, *args: Any, **kwargs: Any) -> Any:
        """As llama_cpp.Llama: a generator of tokens."""
        self._check_computes()
        tokens = list(tokens)
        has_more = self.n_tokens > 0 and not kwargs.get("reset", True)
        values.check_prompt(tokens, self._n_vocab, has_more=has_more)
        values.check_sampling(kwargs)
        self._steps.begin()
        return self._turns.text(super().generate(tokens, *args, **kwargs))

    def _create_completion(self, *args: Any, **kwargs: Any) -> Any:
        """As llama_cpp.Llama."""
        self._check_computes()
        values.check_sampling(kwargs)
        prompt, has_bos = kwargs["prompt"], bool(self._model.add_bos_token())
        has_more = kwargs.get("suffix") is not None or (isinstance(prompt, str) and has_bos)
        values.check_prompt(prompt, self._n_vocab, has_more=has_more)
        return super()._create_completion(*args, **kwargs)

    def create_chat_completion(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
        """As llama_cpp.Llama."""
        self._check_computes()
        values.check_messages(messages)
        with values.says_parts(messages):
            return super().create_chat_completion(messages, *args, **kwargs)

    @in_turn
    def eval(self, tokens: Any) -> None:
        """As llama_cpp.Llama; of drafts the logits of all are there, without `logits_all`."""
        self._check_computes()
        values.check_tokens(tokens, self._n_vocab)
        start_ns = time.perf_counter_ns()
        with self._says_why():
            if self._steps.n_drafted and not self._logits_all:
                self._eval_drafts(list(tokens))
            else:
                super().eval(tokens)
        llama_cpp.llama_synchronize(self.ctx)
        self._steps.evaluated(len(tokens), (time.perf_counter_ns() - start_ns) / 1e3)

    @in_turn
    def embed(self, *args: Any, **kwargs: Any) -> Any:
        """As llama_cpp.Llama."""
        self._check_computes()
        with self._says_why():
            return super().embed(*args, **kwargs)

    @contextmanager
    def _says_why(self) -> Iterator[None]:
        """Of a failed batch llama_cpp.Llama knows only a number; the engine may know more."""
        try:
            yield
        except RuntimeError as error:
            if self._engine and (why := self._engine.tier().error):
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

    def close(self) -> None:
        """As llama_cpp.Llama; what is asked of it afterwards is an error."""
        if "_stack" in vars(self):  # else nothing was opened
            with self._turns.lock:
                super().close()
                self._ctx = self._model = self._batch = Closed()

    def _check_open(self) -> None:
        _ = self._ctx.ctx

    def _check_computes(self) -> None:
        self._check_open()
        if self._loading is None:
            raise InputError("vocab_only=True loads no weights to compute with: make a Llama without it")

    # ---- ours

    def stats(self) -> dict[str, Any]:
        """What happened since the model was loaded: experts, layers, drafts, as in `pyspac run --json`."""
        self._check_open()
        if self._loading is None:
            return {}
        from pyspac.talk.figures import Figures, way_dict

        options = self._loading.options
        info, board = (self._engine.info(), self._engine.board) if self._engine else (None, None)
        return {
            **way_dict(info, self._loading.device.name, self._n_ubatch, is_host_only=options.is_host_only),
            "model": str(options.model),
            **self._drafting_dict(options.draft),
            **self._steps.totals.to_dict(),
            **Figures(board, self._attachment).to_dict(),
        }

    def _drafting_dict(self, path: Path | None) -> dict[str, Any]:
        """The drafter, as in `pyspac run --json`; `path`: its file."""
        from pyspac.speculation.manager import FIXED

        draft = self._given["draft_model"]
        is_object = isinstance(draft, LlamaDraftModel)
        return {
            "draft": str(path) if path else None,
            "mtp": None,
            "spec_type": NONE if draft is None else type(draft).__name__ if is_object else DRAFT,
            "draft_max": self._n_draft_max,
            "speculation": FIXED if draft is not None else None,
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        left_to_us = {"n_batch", "n_ubatch", "op_offload"} - self._given.keys()  # another machine: others
        return {name: value for name, value in state.items() if name not in left_to_us} | self._given


def replace_llama_cpp(**defaults: Any) -> None:
    """Let libraries that import `Llama` from `llama_cpp` after this get pyspac's.

    `defaults`: arguments of `Llama` that such a library does not give, or gives as None.
    """

    class WithDefaults(Llama):
        def __init__(self, model_path: str | os.PathLike[str], **kwargs: Any) -> None:
            given = {name: value for name, value in kwargs.items() if value is not None}
            super().__init__(model_path, **kwargs | defaults | given)

    llama_cpp.Llama = WithDefaults if defaults else Llama
