"""Another file of a model, whose experts may stand in for the model's own (`--lossy lowbit:N:FILE`).

In: its path, and the model's header. Out: the bytes of its experts. Nothing is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pyspac.engine.memory import free_memory
from pyspac.errors import ModelError, UsageError
from pyspac.model.checks import check_model_file
from pyspac.model.gguf_header import GgufHeader
from pyspac.units import MIB

_MATRIX: Final = re.compile(r"blk\.\d+\.ffn_(gate|up|down|gate_up)_exps\.weight")


def copies_bytes(paths: Sequence[Path], model: GgufHeader) -> int:
    """Of memory. Raises ModelError for a file that is no copy of `model`, UsageError if too few are free."""
    n_bytes = sum(_bytes_of(path, model) for path in paths)
    if n_bytes > (free := free_memory()):
        raise UsageError(
            f"the experts of {', '.join(map(str, paths))} take {n_bytes / MIB:.0f} MiB, and "
            f"{free / MIB:.0f} MiB of memory are free: give a file in fewer bits, or close other programs"
        )
    return n_bytes


def _bytes_of(path: Path, model: GgufHeader) -> int:
    from pyspac.engine.engine import has_kernels  # loads the native library, as the rest does anyway

    found = {tensor.name: tensor for tensor in check_model_file(path).tensors}
    n_bytes = 0
    for tensor in model.tensors:
        if not _MATRIX.fullmatch(tensor.name):
            continue
        other = found.get(tensor.name)
        if other is None or other.shape != tensor.shape:
            has = f"has no {tensor.name}" if other is None else f"has a {tensor.name} of {other.shape}"
            raise ModelError(
                f"{path}: this is no copy of {model.path}: it {has}, the model one of {tensor.shape}; give "
                "a file of the same model"
            )
        if not has_kernels(other.type_name):
            raise ModelError(
                f"{path}: the engine has no kernels for {other.type_name} ({other.name}) on this machine; "
                "give another quantisation"
            )
        n_bytes += other.n_bytes
    return n_bytes
