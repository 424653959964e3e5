"""Arguments of `pyspac.Llama` and its calls, as callers give them: text, lists and paths in, what RunOptions
takes out; and errors for what llama.cpp would take for something else, or die of.
"""

from __future__ import annotations

import math
import os
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Final

from gguf.constants import GGMLQuantizationType

from pyspac.checks import check_int
from pyspac.drop_in.errors import InputError, as_input_error
from pyspac.engine.limits import MAX_THREADS
from pyspac.engine.memory import free_memory
from pyspac.engine.params import EngineParams
from pyspac.errors import ConfigError
from pyspac.forward.loading import Loading
from pyspac.model.device_needs import compute_bytes, kv_bytes
from pyspac.model.draft_files import spec_type_of
from pyspac.model.gguf_header import read_header
from pyspac.model.tensor_split import parse_tensor_split
from pyspac.speculation.manager import DEFAULT_DRAFT_MAX
from pyspac.units import MIB

from llama_cpp.llama_speculative import LlamaDraftModel  # isort: skip  # after ours: see steps.py

_MANY: Final = 2**31 - 1
_N_CTX_PAD: Final = 256
_LEAST: Final = {"n_ctx": 0, "n_batch": 1, "n_ubatch": 1}
_CACHE_TYPES: Final = ("F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "IQ4_NL")  # as -ctk's
# of sampling: the least that each may be
_NUMBERS: Final = {"temperature": 0.0, "temp": 0.0} | dict.fromkeys(
    ("top_p", "min_p", "typical_p", "frequency_penalty", "presence_penalty", "repeat_penalty",
     "mirostat_tau", "mirostat_eta"),
    -math.inf,
)  # fmt: skip
_SAID: Final = {"content", "tool_calls", "function_call"}  # of a message, one at least
_MESSAGE: Final = {"role": "user", "content": "Hello"}


def check_known(given: Mapping[str, Any], known: Set[str]) -> None:
    """Raise InputError for unknown arguments: llama_cpp.Llama itself ignores them."""
    if "mtp" in given:
        raise InputError(
            "Llama has no mtp: mask tokens draft in llama-server, so start `pyspac serve -m MODEL --mtp "
            "ADAPTER` and ask it with any OpenAI client, or use `pyspac run`; Llama drafts with draft_model"
        )
    for name in given.keys() - known:
        raise InputError(f"Llama has no argument {name}; see help(pyspac.Llama) and help(llama_cpp.Llama)")


def text_of_names(name: str, value: Any) -> str:
    """ "CUDA0,CUDA1" of ["CUDA0", "CUDA1"], or of itself. Raises InputError for anything else."""
    return _text(name, value, (str,), "a name")


def text_of_sizes(name: str, value: Any) -> str:
    """ "8000,25%" of [8000, "25%"], or of itself; also of a number. Raises InputError for anything else."""
    return _text(name, value, (str, int, float), "a size")


def with_shares(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The same with `tensor_split`, a list or text, as numbers. Raises InputError for what are no shares."""
    shares = kwargs.get("tensor_split")
    if shares is None:
        return kwargs
    with as_input_error():
        text = _text("tensor_split", shares, (str, int, float), "shares of the layers")
        return kwargs | {"tensor_split": list(parse_tensor_split(text))}


def file_of(name: str, value: Any) -> Path | None:
    """The path of a file; None of None. Raises InputError for what is no path."""
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike) or not isinstance(os.fspath(value), str):
        raise InputError(f"{name} cannot be {value!r}: give the path of a GGUF file")
    return Path(value)


def draft_file(value: Any) -> Path | None:
    """The same of a draft model. Raises InputError for a draft that cannot run by itself, ModelError."""
    path = file_of("draft_model", value)
    if path is not None and path.is_file() and spec_type_of(header := read_header(path)):
        raise InputError(
            f"draft_model {path}: this draft ({header.architecture}) reads hidden states of its model, as "
            "`pyspac run` and `pyspac serve` let it; for Llama give a small model that could run by itself"
        )
    return path


def n_draft_max(draft_model: Any, draft_max: Any) -> int:
    """Tokens drafted per step at most; 0: nothing drafts. Raises ConfigError, InputError."""
    longest = EngineParams().max_batch - 1
    if draft_max is not None:
        check_int("draft_max", draft_max, 1, longest)
        if draft_model is None:
            raise InputError(
                f"draft_max {draft_max} has no effect, as nothing drafts: give a small model with "
                "draft_model, or LlamaPromptLookupDecoding()"
            )
        return int(draft_max)
    if draft_model is None:
        return 0
    # an object says itself how much it drafts
    return longest if isinstance(draft_model, LlamaDraftModel) else DEFAULT_DRAFT_MAX


def _text(name: str, value: Any, kinds: tuple[type, ...], what: str) -> str:
    parts = value if isinstance(value, list | tuple) else (value,)
    is_wrong = any(isinstance(part, bool) or not isinstance(part, kinds) or part == "" for part in parts)
    if not parts or is_wrong:
        raise InputError(f"{name} cannot be {value!r}: give {what}, or a list with one for each device")
    return ",".join(str(part) for part in parts)


def check_sizes(given: Mapping[str, Any]) -> None:
    """Raise ConfigError for sizes of the context that are none, and threads that cannot be."""
    for name, least in _LEAST.items():
        if name in given:
            check_int(name, given[name], least, _MANY)
    if (n_threads := given["n_threads_batch"]) is not None:
        check_int("n_threads_batch", n_threads, 1, MAX_THREADS)
    known = {f"GGML_TYPE_{name}": int(GGMLQuantizationType[name]) for name in _CACHE_TYPES}
    for name in ("type_k", "type_v"):
        if given.get(name) is not None and given[name] not in known.values():
            raise InputError(f"{name} cannot be {given[name]!r}: give llama_cpp.{', '.join(known)}")


def check_context(given: Mapping[str, Any], loading: Loading) -> None:
    """Raise ConfigError for a context that is longer than the model's and than memory.

    The model's own is left to llama.cpp: what it needs is known roughly here, and may be less.
    """
    n_ctx, n_train = given.get("n_ctx", 0), loading.preflight.geometry.n_ctx_train
    header, device = loading.preflight.header, loading.device
    needed = kv_bytes(header, n_ctx) + compute_bytes(header, n_ctx)
    free = free_memory() + (0 if device.is_cpu else device.memory_free)
    if n_ctx > n_train and needed > free:
        raise ConfigError(
            "n_ctx",
            n_ctx,
            f"at most {n_train}, the context that the model was trained with (0 chooses it): so many take "
            f"about {needed // MIB} MiB, and {free // MIB} are free",
        )


def padded_context(n_ctx: int) -> int:
    """As llama.cpp rounds it up (llama-context.cpp): llama_cpp.Llama's tables have the size that is given."""
    return -(-n_ctx // _N_CTX_PAD) * _N_CTX_PAD


def check_sampling(given: Mapping[str, Any]) -> None:
    """Raise InputError for NaN and the like, which llama.cpp samples from."""
    for name in _NUMBERS.keys() & given.keys():
        value, least = given[name], _NUMBERS[name]
        if not isinstance(value, Real) or not math.isfinite(value) or value < least:
            wanted = "a number" if least else "a number from 0, which is greedy"
            raise InputError(f"{name} cannot be {value!r}: give {wanted}")


def check_tokens(tokens: Iterable[Any], n_vocab: int) -> None:
    """Raise InputError for what is no token of the model's."""
    for token in tokens:
        is_whole = type(token) is int or isinstance(token, Integral)  # the second one is slow
        if not is_whole or not 0 <= int(token) < n_vocab:
            raise InputError(
                f"a token cannot be {token!r}: give whole numbers from 0 to {n_vocab - 1}, as tokenize() "
                "makes them of text"
            )


def check_prompt(prompt: Any, n_vocab: int, *, has_more: bool) -> None:
    """Raise InputError for what is no text or list of tokens, or is empty and no tokens come with it."""
    if not isinstance(prompt, str):
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
            raise InputError(f"a prompt cannot be {reprlib.repr(prompt)}: give text, or a list of tokens")
        check_tokens(prompt, n_vocab)
    if not prompt and not has_more:
        raise InputError("the prompt has no tokens, so nothing can follow it: give some text")


def check_messages(messages: Any) -> None:
    """Raise InputError for what is no list of messages, each with a role and something that it says."""
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str | bytes)
    if not is_list or not messages or not all(map(_is_message, messages)):
        raise InputError(
            f"messages cannot be {reprlib.repr(messages)}: give a list of messages, such as [{_MESSAGE}]"
        )


def _is_message(one: Any) -> bool:
    if not isinstance(one, Mapping) or "role" not in one or _SAID.isdisjoint(one):
        return False
    return isinstance(one.get("content"), str | list | None)


@contextmanager
def says_parts(messages: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """Raise InputError where the template takes no lists of parts; some do."""
    try:
        yield
    except TypeError as error:
        if parts := next((one["content"] for one in messages if isinstance(one.get("content"), list)), None):
            raise InputError(
                f"content cannot be {reprlib.repr(parts)}: this model's chat template takes text only"
            ) from error
        raise
