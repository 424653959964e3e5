"""How much memory holds experts, of a model whose experts stay on disk (`--ram`).

In: what the user asked for, the model's shape, free memory. Out: MiB for the engine's pool; None: all of the
model is loaded, and there is no such tier.
"""

from __future__ import annotations

from typing import Final

import psutil

from pyspac.engine.values import read_cache_size
from pyspac.errors import UsageError
from pyspac.model.geometry import MoeGeometry
from pyspac.units import MIB

# left free besides what is not an expert: caches of keys and values, compute buffers, and other programs
MARGIN_BYTES: Final = 1 << 30
MARGIN_SHARE: Final = 0.1  # of free memory, where that is less


def check_ram(text: str | None) -> None:
    """Raise UsageError for what is no size."""
    if text is not None and _n_bytes(text, MIB) == 0:
        raise UsageError(f"--ram {text} holds nothing: give MiB, a share of all experts (25%), or auto")


def check_ram_has_no_device(text: str | None, *, has_device: bool) -> None:
    """Raise UsageError where a device would hold experts as well."""
    if text is not None and has_device:
        raise UsageError(
            f"--ram {text}: experts that stay on disk are computed on the host alone so far; add "
            "--device none"
        )


def choose_ram_mib(text: str | None, geometry: MoeGeometry, free_bytes: int | None = None) -> int | None:
    """MiB of the pool. `text`: as given; None: a tier only if the model is larger than free memory."""
    free = psutil.virtual_memory().available if free_bytes is None else free_bytes
    if not geometry.is_moe or (text is None and geometry.model_bytes <= free):
        return None
    n_bytes = None if text is None else _n_bytes(text, geometry.experts_bytes)
    if n_bytes is None:
        n_bytes = _auto_bytes(geometry, free)
    return None if n_bytes >= geometry.experts_bytes else n_bytes // MIB


def bytes_in_memory(geometry: MoeGeometry, ram_mib: int | None) -> int:
    """Of the model: all of it, or what is not an expert and the pool."""
    n_experts_bytes = geometry.experts_bytes if ram_mib is None else ram_mib * MIB
    return geometry.model_bytes - geometry.experts_bytes + n_experts_bytes


def _n_bytes(text: str, experts_bytes: int) -> int | None:
    return read_cache_size(text, experts_bytes)


def _auto_bytes(geometry: MoeGeometry, free: int) -> int:
    others = geometry.model_bytes - geometry.experts_bytes
    n_bytes = free - others - min(MARGIN_BYTES, int(MARGIN_SHARE * free))
    if n_bytes < MIB:
        raise UsageError(
            f"--ram auto: {free // MIB} MiB of memory are free, and what is not an expert takes "
            f"{others // MIB} MiB of them: close other programs, or take a smaller quantisation"
        )
    return n_bytes
