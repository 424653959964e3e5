"""Checks of the input before llama.cpp sees it, so that bad input gives a clear message and not a crash.

In: `ForwardOptions` and the chosen device. Out: a `Preflight`, the headers of the files and what follows from
them. Each check raises an error with exit code 2; nothing is written and no weight is read.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyspac.checks import check_int
from pyspac.engine.devices import Device
from pyspac.engine.values import read_size
from pyspac.errors import ConfigError, ModelError
from pyspac.forward.options import DEFAULT_N_CTX, ForwardOptions
from pyspac.model.checks import check_model_file
from pyspac.model.draft_files import check_drafter, check_is_target
from pyspac.model.geometry import MoeGeometry, read_geometry
from pyspac.model.gguf_header import GgufHeader
from pyspac.model.spec_types import DRAFT
from pyspac.units import MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """What is known about a run before anything is loaded."""

    header: GgufHeader
    geometry: MoeGeometry
    draft: GgufHeader | None  # of a model that will be loaded beside it
    n_ctx: int


def check_run(options: ForwardOptions, device: Device) -> Preflight:
    """All checks that need the files' headers and the device only."""
    header = check_model_file(options.model)
    check_is_target(header)
    geometry = read_geometry(header)
    if not options.stock:
        _check_can_split(options, geometry, device)
    draft = None
    if options.draft is not None:
        draft = check_model_file(options.draft)
        check_drafter(DRAFT, header, draft)
    return Preflight(
        header=header,
        geometry=geometry,
        draft=draft,
        n_ctx=choose_n_ctx(options.n_ctx, geometry),
    )


def has_own_kernels(header: GgufHeader) -> bool:
    """Whether the engine's own kernels would multiply most of a model's weights on this machine."""
    from pyspac.engine.engine import has_kernels  # loads the native library, as the rest does anyway

    n_own = n_all = 0
    for tensor in header.tensors:
        if len(tensor.shape) < 2 or tensor.name == "token_embd.weight":  # of which rows are looked up
            continue
        is_floats = len(tensor.shape) == 2 and tensor.type_name in ("F16", "BF16")  # llama.cpp's are as fast
        n_all += tensor.n_bytes
        n_own += tensor.n_bytes if has_kernels(tensor.type_name) and not is_floats else 0
    return 2 * n_own > n_all


def _check_can_split(options: ForwardOptions, geometry: MoeGeometry, device: Device) -> None:
    if options.is_host_only:
        return
    if not geometry.is_moe:
        raise ModelError(
            f"{options.model}: this is a dense model ({geometry.architecture}), without experts to split; "
            "give a Mixture-of-Experts model, or run this one on the CPU (--device none), or in plain "
            "llama.cpp (`pyspac run --stock`)"
        )
    n_bytes = options.cache.n_bytes(geometry.experts_bytes)
    if n_bytes is None:
        return
    largest = max(layer.expert_bytes for layer in geometry.moe_layers)
    if n_bytes < largest:
        raise ConfigError(
            "--cache", options.cache.text, f"room for at least one expert, {largest / MIB:.2f} MiB"
        )
    several = device.parts
    for part, size in zip(device.each, options.cache.of_devices(len(device.each)), strict=True):
        # of a share of some layers' experts, which these are the engine finds out
        asked = read_size("--cache", size, 0 if several else geometry.experts_bytes)
        _check_fits(size, asked or 0, geometry, part)


def _check_fits(text: str, asked: int, geometry: MoeGeometry, device: Device) -> None:
    """With the engine's margin, for as many experts as there are; and never more than the device has."""
    from pyspac.engine.limits import MIN_MARGIN_BYTES  # loads the native library, as the rest does anyway

    room = max(0, device.memory_free - (0 if device.is_cpu else MIN_MARGIN_BYTES))
    if asked > device.memory_free or min(asked, geometry.experts_bytes) > room:
        raise ConfigError(
            "--cache",
            text,
            f"at most the {room / MIB:.0f} MiB that it may take of {device.name}'s free memory "
            f"({asked / MIB:.0f} MiB were asked for)",
        )


def choose_n_ctx(wanted: int | None, geometry: MoeGeometry) -> int:
    """The context in tokens; 0 asks for the model's own."""
    n_train = geometry.n_ctx_train or DEFAULT_N_CTX
    if wanted is None:
        return min(n_train, DEFAULT_N_CTX)
    check_int("-c", wanted, 0)
    if wanted > n_train:
        raise ConfigError(
            "-c", wanted, f"at most {n_train}, the context that the model was trained with (0 chooses it)"
        )
    return wanted or n_train
