"""How much of the device the experts' slots may take: model headers and free memory in, --spac-cache out.

The engine attaches when the target's context is made, before a draft model is loaded, so "what is free" then
is more than it may take. What comes later is subtracted here.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Final, TypeAlias

from pyspac.engine.devices import Device
from pyspac.engine.values import read_size
from pyspac.errors import ConfigError, UsageError
from pyspac.forward.options import DEFAULT_N_CTX, CacheSize
from pyspac.model.device_needs import N_UBATCH, Needs, context_bytes
from pyspac.model.geometry import MoeGeometry, read_geometry
from pyspac.model.gguf_header import GgufHeader
from pyspac.model.memory_tier import margin_bytes
from pyspac.server.options import SERVER_SLOTS, ServeOptions
from pyspac.units import MIB

CONTEXT_SHARE: Final = 8  # contexts take an eighth of what is free, unless -c says how many tokens
N_CTX_STEP: Final = 4096
_STRETCHING: Final = ("--rope-", "--yarn-", "--override-kv")  # llama-server's flags
Shares: TypeAlias = tuple[float, ...]


def check_n_ctx(options: ServeOptions, geometry: MoeGeometry) -> None:
    """Raise ConfigError for more than all server slots can use; unless the model's context is stretched."""
    n_train = geometry.n_ctx_train
    if not options.n_ctx or not n_train or any(flag.startswith(_STRETCHING) for flag in options.passed):
        return
    n_slots = options.n_server_slots
    slots_text = "1 slot" if n_slots == 1 else f"{n_slots} slots"
    if options.n_ctx > n_train * n_slots:
        raise ConfigError(
            "-c",
            options.n_ctx,
            f"at most {n_train * n_slots}: {slots_text} with {n_train} tokens each, the context that the "
            "model was trained with",
        )


def choose_server_n_ctx(
    wanted: int | None,
    target: GgufHeader,
    draft: GgufHeader | None,
    device: Device,
    n_server_slots: int = SERVER_SLOTS,
    n_ubatch: int = N_UBATCH,
) -> int:
    """The context in tokens, over all server slots; 0 asks for the model's own, None for what memory allows.

    That is the model's own, or as much of it as a share of the free memory holds.
    """
    geometry = read_geometry(target)
    least = DEFAULT_N_CTX * n_server_slots
    n_train = geometry.n_ctx_train or least
    if wanted is not None:
        return wanted or n_train
    per_token = sum(context_bytes(header, n_ubatch) for header in (target, draft) if header is not None)
    n_held = _room_for_context(geometry, device) // max(1, per_token)
    return min(n_train, max(least, n_held // N_CTX_STEP * N_CTX_STEP))


def _room_for_context(geometry: MoeGeometry, device: Device) -> int:
    """Bytes of the memory that is free where contexts are: what they take, experts do not get."""
    free = device.memory_free
    if not device.is_cpu:
        return free // CONTEXT_SHARE
    left = free - geometry.model_bytes - margin_bytes(free)
    return min(free // CONTEXT_SHARE, left // 2) if left > 0 else free // (2 * CONTEXT_SHARE)


def choose_cache(text: str, geometry: MoeGeometry, needs: Needs, device: Device, shares: Shares = ()) -> str:
    """The value of --spac-cache: `text`, but "auto" of a real device is the MiB that are left there.

    `shares`: of the layers, of each device, if they were given. Raises ConfigError if nothing is left.
    """
    parts = device.each
    sizes = CacheSize(text=text).of_devices(len(parts))
    each = zip(sizes, parts, _needs_of_each(needs, device, shares), strict=True)
    chosen = [_choose_size(size, geometry, part_needs, part) for size, part, part_needs in each]
    return ",".join(chosen) if device.parts else chosen[0]


def _choose_size(text: str, geometry: MoeGeometry, needs: Needs, device: Device) -> str:
    if text != "auto" or device.is_cpu:
        return text  # "auto" is the engine's own share on the CPU
    left = device.memory_free - needs.total
    if left < max(layer.expert_bytes for layer in geometry.moe_layers):
        raise UsageError(f"no room is left for experts: {_too_little(needs, device)}")
    return str(min(left, geometry.experts_bytes) // MIB or 1)


def _needs_of_each(needs: Needs, device: Device, shares: Shares) -> list[Needs]:
    """What each of several devices needs: of weights and caches its share, as llama.cpp deals out layers."""
    if not device.parts:
        return [needs]
    weights = shares or [part.memory_free for part in device.parts if not part.is_cpu]
    parts = iter([weight / (sum(weights) or 1) for weight in weights])
    return [_scaled(needs, 0.0 if part.is_cpu else next(parts)) for part in device.parts]


def _scaled(needs: Needs, share: float) -> Needs:
    parts = {name: int(share * getattr(needs, name)) for name in ("weights", "draft", "kv")}
    return replace(needs, **parts)


def why_tight(
    text: str, geometry: MoeGeometry, needs: Needs, device: Device, shares: Shares = ()
) -> str | None:
    """Why a given size may be too much; None: it fits. The estimate is an upper bound, so it is no error.

    `shares`: as of choose_cache; `text`: what that returned.
    """
    of_each = _needs_of_each(needs, device, shares)
    for size, part, part_needs in zip(text.split(","), device.each, of_each, strict=True):
        asked = None if device.parts and "%" in size else read_size("--cache", size, geometry.experts_bytes)
        if asked is not None and not part.is_cpu and part_needs.total + asked > part.memory_free:
            return _too_little(part_needs, part)
    return None


def _too_little(needs: Needs, device: Device) -> str:
    listed = ", ".join(f"{name} {n_bytes / MIB:.0f}" for name, n_bytes in asdict(needs).items())
    return (
        f"{device.name} has {device.memory_free / MIB:.0f} MiB free, and beside the experts' slots "
        f"{needs.total / MIB:.0f} are needed ({listed}); use a smaller --cache, context (-c) or draft model"
    )
