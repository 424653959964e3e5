"""libllama as llama-cpp-python binds it; importing this loads it, with the build's libraries."""

from __future__ import annotations

import os

import pyspac._native  # noqa: F401  sets LLAMA_CPP_LIB_PATH
from pyspac.errors import PyspacError


class LlamaError(PyspacError):
    """llama.cpp failed at something that is not the user's input."""


try:
    from llama_cpp import llama_cpp as lib
except (FileNotFoundError, RuntimeError, AttributeError) as error:
    raise LlamaError(
        f"libllama cannot be loaded from {os.environ.get('LLAMA_CPP_LIB_PATH', 'the package llama_cpp')} "
        f"({error}); build the project, or set LLAMA_CPP_LIB_PATH to the folder that holds its libllama.so"
    ) from error

__all__ = ["LlamaError", "lib"]
