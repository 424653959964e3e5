"""Errors of `pyspac.Llama`: of the types that llama-cpp-python raises, in the words of Python's arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from pyspac.errors import PyspacError
from pyspac.forward.libllama import LlamaError

# how a flag of the command line is spelt here; of those that are none, what is said with them
_SPELLINGS: Final = (
    (r",? or --spec-type none\b| \(--spec-type none\)", ""),
    (r" with -m, and this file with -md and --spec-type .*", ""),
    (r"`pyspac run --stock`", "--stock"),
    (r"--(device|host-kernels) (none|auto|emulated|ggml|spac)\b", r'\1="\2"'),
    (r"--spec-type ngram\b", "LlamaPromptLookupDecoding()"),
    (r"--stock\b", "stock=True"),
    (r"--(cache|ram|device|rpc|tensor-split|host-kernels|draft-max)\b", r"\1"),
    (r"(?<!\S)-md\b", "draft_model"),
    (r"(?<!\S)-ngl\b", "n_gpu_layers"),
    (r"(?<!\S)-t\b", "n_threads"),
    (r"(?<!\S)-c\b", "n_ctx"),
    (r"\bhost-kernels\b", "host_kernels"),
    (r"\btensor-split\b", "tensor_split"),
    (r"\bdraft-max\b", "draft_max"),
)


class InputError(PyspacError, ValueError):
    """What was asked for cannot be done; a ValueError, as llama-cpp-python's own."""

    exit_code = 2


class DecodeError(LlamaError, RuntimeError):
    """A batch could not be computed; a RuntimeError, as llama-cpp-python's own."""


@contextmanager
def as_input_error() -> Iterator[None]:
    """Bad input is a ValueError, and names arguments instead of the command line's flags."""
    try:
        yield
    except PyspacError as error:
        if error.exit_code != InputError.exit_code:
            raise
        text = str(error)
        for flag, argument in _SPELLINGS:
            text = re.sub(flag, argument, text)
        raise InputError(text) from error
