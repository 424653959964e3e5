"""How much memory holds experts, of a model whose experts stay on disk (`--ram`).

In: what the user asked for, the model's shape, free memory. Out: bytes of the engine's pool; None: there is
no such tier, and all of the model is loaded.
"""

from __future__ import annotations

import os
from typing import Final

from pyspac.engine.devices import Device
from pyspac.engine.memory import free_memory
from pyspac.engine.values import AUTO, read_size
from pyspac.errors import UsageError
from pyspac.model.device_needs import Needs
from pyspac.model.geometry import MoeGeometry
from pyspac.units import GIB, MIB

FLAG: Final = "--ram"
VARIABLE: Final = "PYSPAC_RAM"
MEANS_MIB: Final = f"A number without a unit is MiB: {FLAG} 8G is 8 GiB"
# left free besides the model and its contexts: what the program takes itself, and other programs
MARGIN_BYTES: Final = GIB
MARGIN_SHARE: Final = 0.1  # of free memory, where that is less
_AUTO_EMULATED_SHARE: Final = 0.25  # of all experts, that an emulated device holds with --cache auto


def given_ram(option: str | None, *, is_stock: bool = False) -> str | None:
    """`--ram`, else what the environment says; "" there says nothing, nor does it speak to `--stock`."""
    if option is not None or is_stock:
        return option
    text = os.environ.get(VARIABLE) or None
    try:
        check_ram(text)
    except UsageError as error:
        raise UsageError(f"{VARIABLE}: {error}") from error
    return text


def check_ram(text: str | None) -> None:
    """Raise UsageError for what is no size."""
    if text is not None and read_size(FLAG, text, GIB) == 0:
        raise UsageError(
            f"--ram {text} holds nothing: give MiB (8000), GiB (8G), a share of all experts or auto"
        )


def choose_ram(
    text: str | None,
    geometry: MoeGeometry,
    device: Device,
    needs: Needs,
    *,
    cache_bytes: int | None,
    host_kernels: str = "auto",
    copies_bytes: int = 0,
    is_split: bool = False,
) -> int | None:
    """What `pool_bytes` says of a run or a server; None as well where it is not the engine that computes.

    cache_bytes: of the device's slots, as of `host_bytes`; copies_bytes: of experts in fewer bits;
    is_split: some layers besides the experts stay on the host, and how much they take is unknown. Raises
    UsageError.
    """
    can = host_kernels != "ggml" and _has_kernels()
    if text is not None and not can:
        raise UsageError(
            f"--ram {text}: the engine has no kernels for this processor (they need AVX2, FMA and F16C; on "
            "ARM the dot product of bytes), so experts cannot stay on disk: leave it out"
        )
    if not can:
        return None
    is_unknown = is_split and not device.is_cpu
    rest = geometry.model_bytes - geometry.experts_bytes
    others = rest if is_unknown else host_bytes(geometry, device, cache_bytes, needs)
    return pool_bytes(text, geometry, others=others + copies_bytes, has_device=device.has_cache)


def _has_kernels() -> bool:
    """Of the engine's own, for this processor; types that they lack ggml's dot products compute."""
    from pyspac.engine.engine import has_kernels  # loads the native library, as the rest does anyway

    return has_kernels("Q8_0")


def host_bytes(geometry: MoeGeometry, device: Device, cache_bytes: int | None, needs: Needs) -> int:
    """What a model takes of the host's memory beside the experts that are there.

    Without a device, what is no expert, the draft model, and the contexts' caches and buffers; a GPU has all
    that, and an emulated device's slots come on top of it. cache_bytes: of the slots; None: as many as "auto"
    gives.
    """
    others = needs.weights + needs.draft + needs.kv + needs.compute
    if not device.has_cache:
        return others
    if not device.is_cpu:
        return 0
    if cache_bytes is None:
        return others + int(_AUTO_EMULATED_SHARE * geometry.experts_bytes)
    return others + min(cache_bytes, geometry.experts_bytes)


def pool_bytes(
    text: str | None,
    geometry: MoeGeometry,
    free_bytes: int | None = None,
    others: int | None = None,
    *,
    has_device: bool = False,
) -> int | None:
    """Bytes of the pool; None: no tier, as all experts fit.

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
    if text is None and geometry.experts_bytes + others + margin_bytes(free) <= free:
        return None
    asked = read_size(FLAG, text or AUTO, geometry.experts_bytes)
    n_bytes = _auto_bytes(others, free) if (is_auto := asked is None) else asked
    if n_bytes >= geometry.experts_bytes and (is_auto or geometry.experts_bytes + others <= free):
        return None
    least = least_bytes(geometry, has_device=has_device)
    if text is None and n_bytes < least:
        return None  # not asked for: llama.cpp maps the file, as ever
    _check_room(f"--ram {text or AUTO}", n_bytes, least, free, others)
    return n_bytes


def asked_bytes(text: str, geometry: MoeGeometry, free_bytes: int | None = None) -> int:
    """Bytes that `--ram` of a model with experts names, whether this machine has them or not.

    auto: what is free, and no more than all experts take. Raises UsageError for what is no size.
    """
    asked = read_size(FLAG, text, geometry.experts_bytes)
    if asked is not None:
        return asked
    free = free_memory() if free_bytes is None else free_bytes
    others = geometry.model_bytes - geometry.experts_bytes
    return min(geometry.experts_bytes, _auto_bytes(others, free))


def least_bytes(geometry: MoeGeometry, *, has_device: bool = False) -> int:
    """The least that works: one layer's experts at once, and what passes through to a device."""
    return (geometry.n_expert + has_device) * geometry.slot_bytes


def n_slots(geometry: MoeGeometry, n_bytes: int, *, has_device: bool = False) -> int:
    """How many experts `--ram` holds, as the engine says it: all, where they need not stay on disk."""
    if n_bytes >= geometry.experts_bytes:
        return geometry.n_experts_total
    return max(0, min(n_bytes // geometry.slot_bytes - has_device, geometry.n_experts_total))


def margin_bytes(free: int) -> int:
    """Left free besides a model and its contexts."""
    return min(MARGIN_BYTES, int(MARGIN_SHARE * free))


def _auto_bytes(others: int, free: int) -> int:
    return max(0, free - others - margin_bytes(free))


def _check_room(given: str, n_bytes: int, least: int, free: int, others: int) -> None:
    """Whether so much is there, and enough for one layer at once."""
    room = free - others
    if n_bytes > room:
        raise UsageError(
            f"{given}: {free // MIB} MiB of memory are free, and what else the model needs takes "
            f"{others // MIB} MiB of them: give {max(0, room) // MIB} or less, "
            "close other programs, or take a smaller quantisation"
        )
    if n_bytes < least:
        raise UsageError(
            f"{given}: {n_bytes / MIB:.1f} MiB cannot hold the experts of one layer at once; give "
            f"{-(-least // MIB)} MiB at least, of {free // MIB} MiB "
            "that are free, or take a smaller quantisation. A number without a unit is MiB: 8G is 8 GiB"
        )
