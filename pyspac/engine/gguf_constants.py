"""The gguf package's tables of types, without the rest of it, which loads numpy and yaml."""

from __future__ import annotations

from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING


def _load() -> ModuleType:
    package = find_spec("gguf")  # loads nothing
    if package is None or package.origin is None:
        raise ModuleNotFoundError("No module named 'gguf'", name="gguf")
    spec = spec_from_file_location("gguf_constants", Path(package.origin).with_name("constants.py"))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if TYPE_CHECKING:
    from gguf import constants
else:
    constants = _load()

GGML_QUANT_SIZES = constants.GGML_QUANT_SIZES
GGMLQuantizationType = constants.GGMLQuantizationType
GGUFValueType = constants.GGUFValueType
