"""How much memory holds experts, of a model whose experts stay on disk (`--ram`).

In: what the user asked for, the model's shape, free memory. Out: MiB for the engine's pool; None: all of the
model is loaded, and there is no such tier.
"""

from __future__ import annotations

import re
from typing import Final

from pyspac.engine.devices import Device
from pyspac.engine.memory import free_memory
from pyspac.errors import UsageError
from pyspac.model.device_needs import N_UBATCH, Needs
from pyspac.model.geometry import N_MATRICES, MoeGeometry
from pyspac.units import GIB, MIB

AUTO: Final = "auto"
# left free besides the model and its contexts: what the program takes itself, and other programs
MARGIN_BYTES: Final = GIB
MARGIN_SHARE: Final = 0.1  # of free memory, where that is less
# tokens of a prompt computed at once: each piece reads all experts, so 1,024 read half of what 512 do
PROMPT_PIECE: Final = 1024
# In a slot each of an expert's matrices has whole blocks of the disk around it. How large those are the
# engine asks the kernel, by a call that Python has not: 4 KiB on nearly every disk. Where they are larger,
# and memory is too little for them, the engine says so itself.
BLOCKS_BYTES: Final = N_MATRICES * 2 * 4096
_AUTO_EMULATED_SHARE: Final = 0.25  # of all experts, that an emulated device holds with --cache auto
_TOO_MANY: Final = 1e12  # of any unit
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(%|[MG]i?B?)?", re.IGNORECASE)


def check_ram(text: str | None) -> None:
    """Raise UsageError for what is no size."""
    if text is not None and text != AUTO and _n_bytes(text, GIB) == 0:
        raise UsageError(
            f"--ram {text} holds nothing: give MiB (8000), GiB (8G), a share of all experts or auto"
        )


def check_ram_has_kernels(text: str | None, *, has_kernels: bool) -> None:
    """Raise UsageError where llama.cpp would compute the experts, which reads them from the mapped file."""
    if text is not None and not has_kernels:
        raise UsageError(
            f"--ram {text}: the engine has no kernels for this model's types here, so its experts cannot "
            "stay on disk; leave it out, or take a quantisation such as Q4_K or Q8_0"
        )


def host_bytes(geometry: MoeGeometry, device: Device, cache_bytes: int | None, needs: Needs) -> int:
    """What a model takes of the host's memory beside the experts that are there.

    Without a device, what is no expert, the draft model, and the contexts' caches and buffers; a GPU has all
    that, and an emulated device's slots come on top of it. cache_bytes: of the slots; None: as many as "auto"
    gives. Buffers are those of a PROMPT_PIECE.
    """
    pieces = PROMPT_PIECE // N_UBATCH
    others = needs.weights + needs.draft + needs.kv + pieces * needs.compute
    if not device.has_cache:
        return others
    if not device.is_cpu:
        return 0
    if cache_bytes is None:
        return others + int(_AUTO_EMULATED_SHARE * geometry.experts_bytes)
    return others + min(cache_bytes, geometry.experts_bytes)


def choose_ram_mib(
    text: str | None, geometry: MoeGeometry, free_bytes: int | None = None, others: int | None = None
) -> int | None:
    """MiB of the pool; None: no tier, as all experts fit.

    text: as given; None: a tier only if the model does not fit into free memory, and a layer's experts do.
    others: bytes in memory beside the pool, as of `host_bytes`; None: the model's but for experts. Raises
    UsageError.
    """
    free = free_memory() if free_bytes is None else free_bytes
    others = geometry.model_bytes - geometry.experts_bytes if others is None else others
    if not geometry.is_moe:
        if text is not None:
            raise UsageError(
                f"--ram {text}: a dense model has no experts that could stay on disk; leave it out"
            )
        return None
    if text is None and geometry.experts_bytes + others + _margin(free) <= free:
        return None
    is_auto = text is None or text == AUTO
    n_bytes = _auto_bytes(others, free) if is_auto else _n_bytes(str(text), geometry.experts_bytes)
    if n_bytes >= geometry.experts_bytes and (is_auto or geometry.experts_bytes + others <= free):
        return None
    if text is None and n_bytes < least_bytes(geometry):
        return None  # nobody asked for it: llama.cpp maps the file, as ever
    _check_room(f"--ram {text or AUTO}", n_bytes, geometry, others, free)
    return n_bytes // MIB


def asked_bytes(text: str, geometry: MoeGeometry, free_bytes: int | None = None) -> int:
    """Bytes that `--ram` of a model with experts names, whether this machine has them or not.

    auto: what is free, and no more than all experts take. Raises UsageError for what is no size.
    """
    if text == AUTO:
        free = free_memory() if free_bytes is None else free_bytes
        others = geometry.model_bytes - geometry.experts_bytes
        return min(geometry.experts_bytes, _auto_bytes(others, free))
    return _n_bytes(text, geometry.experts_bytes)


def least_bytes(geometry: MoeGeometry) -> int:
    """The least that works: one layer's experts at once, each with whole blocks of the disk around it."""
    return geometry.n_expert * (geometry.largest_expert_bytes + BLOCKS_BYTES)


def _n_bytes(text: str, experts_bytes: int) -> int:
    """Bytes of "8000" (MiB), "8G", "8000MiB" or "25%" of all experts'."""
    match = _SIZE.fullmatch(text.strip())
    number, unit = (float(match[1]), (match[2] or "M").upper()) if match else (-1.0, "M")
    if not 0.0 <= number < _TOO_MANY or (unit == "%" and number > 100.0):
        raise UsageError(
            f"--ram {text} is no size: give MiB (8000), GiB (8G), a share of all experts (25%), or auto"
        )
    return int(number * (experts_bytes / 100.0 if unit == "%" else GIB if unit[0] == "G" else MIB))


def _margin(free: int) -> int:
    return min(MARGIN_BYTES, int(MARGIN_SHARE * free))


def _auto_bytes(others: int, free: int) -> int:
    return max(0, free - others - _margin(free))


def _check_room(given: str, n_bytes: int, geometry: MoeGeometry, others: int, free: int) -> None:
    """Whether so much is there, and enough for one layer at once."""
    room = free - others
    if n_bytes > room:
        raise UsageError(
            f"{given}: {free // MIB} MiB of memory are free, and what else the model needs takes "
            f"{others // MIB} MiB of them: give {max(0, room) // MIB} or less, "
            "close other programs, or take a smaller quantisation"
        )
    if n_bytes < geometry.n_expert * geometry.largest_expert_bytes:
        raise UsageError(
            f"{given}: {n_bytes / MIB:.1f} MiB cannot hold the experts of one layer at once; give "
            f"{-(-least_bytes(geometry) // MIB)} MiB at least, of {free // MIB} MiB "
            "that are free, or take a smaller quantisation"
        )
