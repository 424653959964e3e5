"""--tensor-split: a device's share of the layers each. Text in, shares out, and what is wrong with them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from pyspac.errors import ConfigError, UsageError
from pyspac.model.layer_shares import device_of_layers

if TYPE_CHECKING:
    from pyspac.engine.devices import Device
    from pyspac.model.geometry import MoeGeometry

FLAG: Final = "--tensor-split"
_WANTED: Final = "a share of the layers for each device, such as 3,1: numbers of 0 or more, and not all 0"
_WANTED_FLOATS: Final = (
    "shares of the size of 3,1, as llama.cpp takes them as 32-bit floats, and there the sum of these is 0 or "
    "not finite"
)


def parse_tensor_split(text: str) -> tuple[float, ...]:
    """The numbers of "3,1", or of "3/1" as llama.cpp takes it; none of "". Raises ConfigError."""
    if not text:
        return ()
    if (
        "_" in text or not text.isascii()
    ):  # Python reads 1_0 and other scripts' digits; llama.cpp's C does not
        raise ConfigError(FLAG, text, _WANTED)
    try:
        shares = tuple(float(part) for part in re.split("[,/]", text))
    except ValueError:
        raise ConfigError(FLAG, text, _WANTED) from None
    check_shares(shares)
    return shares


def check_shares(shares: Sequence[float]) -> None:
    """Raise ConfigError for what are no shares; () is as good as none given."""
    if any(not math.isfinite(share) or share < 0 for share in shares) or (shares and not any(shares)):
        raise ConfigError(FLAG, text_of(shares), _WANTED)
    if not shares:
        return
    import numpy as np  # loaded here: it takes longer than the rest of a command

    with np.errstate(over="ignore"):
        total = np.asarray(shares, np.float32).sum(dtype=np.float32)
    if not 0 < total < math.inf:
        raise ConfigError(FLAG, text_of(shares), _WANTED_FLOATS)


def check_n_numbers(flag: str, values: Sequence[float], n: int, device: Device) -> None:
    """Raise UsageError unless there is one for each of `n` devices, or none."""
    if not values or len(values) == n:
        return
    if n == 0:
        raise UsageError(
            f"{flag} {text_of(values)} needs a device with layers, and there is none (no GPU was found, or "
            "--device none or emulated was given): leave it out"
        )
    given = "1 number" if len(values) == 1 else f"{len(values)} numbers"
    there = "is 1 device" if n == 1 else f"are {n} devices"
    raise UsageError(
        f"{flag} {text_of(values)} has {given}, and there {there} with layers ({device.name}): give one for "
        "each, or leave it out"
    )


def check_reach(
    shares: Sequence[float], device: Device, geometry: MoeGeometry, n_gpu_layers: int | None
) -> None:
    """Raise UsageError if one of several devices would get no MoE layer: it would hold nothing."""
    if not shares or not device.parts:
        return
    of_layers = device_of_layers(shares, geometry.n_layer, n_gpu_layers)
    used = {of_layers[layer.il] for layer in geometry.moe_layers}
    if used == {None}:
        raise UsageError(
            f"-ngl {n_gpu_layers} puts no MoE layer of this model on a device (the output counts as one "
            f"layer more), so {FLAG} {text_of(shares)} shares out nothing: raise -ngl, or leave both out"
        )
    for i, part in enumerate(part for part in device.parts if not part.is_cpu):
        if i not in used:
            raise UsageError(
                f"{FLAG} {text_of(shares)} gives {part.name} no MoE layer of this model: name the other "
                "devices with --device, or give it a larger share (the output counts as one layer more)"
            )


def text_of(shares: Sequence[float]) -> str:
    return ",".join(f"{share:g}" for share in shares)
