"""libllama as `pyspac.forward` loads it."""

from pyspac.forward.libllama import LlamaError, lib

__all__ = ["LlamaError", "lib"]
