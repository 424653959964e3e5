"""How a model is loaded: device, checks, where the weights go.

In: `ForwardOptions`. Out: a `Loading`, which knows the parameters of model and context; nothing is open.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from pyspac.engine.cpus import default_n_threads
from pyspac.engine.devices import Device, choose_device, fits_memory
from pyspac.engine.memory import free_memory
from pyspac.errors import ModelError
from pyspac.forward.options import ForwardOptions
from pyspac.forward.preflight import Preflight, check_run, has_own_kernels
from pyspac.model.device_needs import N_UBATCH, estimate_needs
from pyspac.model.memory_tier import choose_ram
from pyspac.model.prompt_piece import fit_piece, wanted_piece
from pyspac.model.tensor_split import FLAG, check_n_numbers, check_reach

if TYPE_CHECKING:
    from pyspac.forward.context import Context, ContextParams
    from pyspac.forward.model import ModelParams

Progress = Callable[[str, float], bool]  # (what is loading, 0.0 .. 1.0); False stops the loading


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """What is decided before anything is loaded; `options` are those that fit device and model."""

    options: ForwardOptions
    device: Device
    preflight: Preflight
    n_threads: int
    ram_bytes: int | None  # memory for experts that stay on disk; None: all are loaded
    n_ubatch: int = N_UBATCH  # tokens of a prompt that are computed at once

    @classmethod
    def of(cls, options: ForwardOptions) -> Self:
        """Raises a PyspacError for bad input."""
        from pyspac.engine.limits import check_n_threads  # loads the native library, as the rest does anyway

        if options.n_threads is not None:
            check_n_threads("-t", options.n_threads, 1)
        device = choose_device(options.device, options.rpc, is_split=not options.stock)
        options = options.on(device)
        preflight = check_run(options, device)
        ram = None if options.stock else _ram_bytes(options, preflight, device)
        is_ours = options.stock or not options.is_host_only or ram is not None
        lacks_kernels = not is_ours and not has_own_kernels(preflight.header)
        # llama.cpp's kernels are the best there, and it may repack for them
        options = replace(options, stock=True, repack=True) if lacks_kernels else options
        found = cls(
            options=options,
            device=device,
            preflight=preflight,
            n_threads=options.n_threads or default_n_threads(),
            ram_bytes=ram,
            n_ubatch=_n_ubatch(options, preflight, is_on_disk=ram is not None),
        )
        found.check_tensor_split()
        return found

    def with_layers(self, n_gpu_layers: int | None, tensor_split: Sequence[float] | None) -> Self:
        """The same with layers given to devices in this way; None: as llama.cpp does. Raises ConfigError."""
        shares = () if tensor_split is None else tuple(tensor_split)
        found = replace(self, options=replace(self.options, n_gpu_layers=n_gpu_layers, tensor_split=shares))
        found.check_tensor_split()
        return found

    def check_tensor_split(self) -> None:
        """Raise UsageError unless it has a number for each device, and each gets something to hold."""
        shares, device = self.options.tensor_split, self.device
        check_n_numbers(FLAG, shares, len(device.handles), device)
        if not self.options.stock:
            check_reach(shares, device, self.preflight.geometry, self.options.n_gpu_layers)

    def model_params(self) -> ModelParams:
        """The target's: with a device, all layers on it but the routed experts, which stay on the host.

        Weights keep the file's layout unless stock may repack them, so that stock and split compute the
        same bits. Without a device they are copied into memory with huge pages, if there is room for it
        beside the file's pages. Where experts stay on disk, all else is copied.
        """
        from pyspac.forward.model import (
            ALL_TENSORS,
            EXPERT_TENSORS,
            LAZY_MODE_AUTO,
            LAZY_MODE_EXPERTS,
            LOAD_MODE_AUTO,
            LOAD_MODE_NONE,
            ModelParams,
        )

        has_own_memory = self._fits_own_memory()  # free memory changes: ask once
        stays_mapped = self.device.is_cpu and not has_own_memory and self.ram_bytes is None
        return ModelParams(
            path=self.options.model,
            n_gpu_layers=self._n_gpu_layers(),
            devices=self.device.handles,
            tensor_split=self.options.tensor_split,
            buft=self._buffer_type(has_own_memory),
            buft_tensors=ALL_TENSORS if has_own_memory else EXPERT_TENSORS,
            use_extra_bufts=self.options.repack,
            lazy_mode=LAZY_MODE_AUTO if self.ram_bytes is None else LAZY_MODE_EXPERTS,
            load_mode=LOAD_MODE_AUTO if stays_mapped else LOAD_MODE_NONE,
        )

    def _fits_own_memory(self) -> bool:
        """Whether weights are copied out of the file; else they stay mapped, and may exceed memory."""
        is_wanted = self.options.is_host_only and not self.options.stock
        has_room = self.ram_bytes is not None or fits_memory(self.preflight.geometry.model_bytes)
        return is_wanted and has_room

    def _buffer_type(self, has_own_memory: bool) -> int | None:
        from pyspac.engine import engine

        if has_own_memory:
            return engine.host_buffer_type()
        return None if self.device.is_cpu else engine.cpu_buffer_type()

    def _n_gpu_layers(self) -> int:
        from pyspac.forward.model import ALL_LAYERS

        if self.device.is_cpu:
            return 0
        return ALL_LAYERS if self.options.n_gpu_layers is None else self.options.n_gpu_layers

    def context_params(self) -> ContextParams:
        """The target's."""
        from pyspac.forward.context import ContextParams

        options = self.options
        return ContextParams(
            n_ctx=self.preflight.n_ctx,
            n_ubatch=self.n_ubatch,
            n_sequences=options.n_sequences,
            n_outputs_max=options.width * options.n_sequences,
            n_rollback_max=options.width if options.width > 1 else 0,
            n_threads=self.n_threads,
            op_offload=not self.device.is_cpu,
        )

    def open_draft(self, stack: ExitStack, progress: Progress, n_ctx: int) -> Context:
        """A context of `options.draft`, a model on the same device; `stack` closes both. It has no engine."""
        from pyspac.forward.context import Context, ContextParams
        from pyspac.forward.model import ALL_LAYERS, Model, ModelParams

        assert self.options.draft is not None
        is_cpu = self.device.is_cpu
        params = ModelParams(
            path=self.options.draft,
            n_gpu_layers=0 if is_cpu else ALL_LAYERS,
            devices=self.device.handles,
        )
        model = stack.enter_context(Model(params, lambda fraction: progress("draft model", fraction)))
        if model.is_recurrent:
            raise ModelError(
                f"{model.path}: a draft model with recurrent layers cannot take back rejected tokens; use "
                "one without"
            )
        sizes = ContextParams(n_ctx=n_ctx, n_threads=self.n_threads, op_offload=not is_cpu)
        return stack.enter_context(Context(model, sizes))


def _ram_bytes(options: ForwardOptions, preflight: Preflight, device: Device) -> int | None:
    n_ubatch = _n_ubatch(options, preflight, is_on_disk=True)
    needs = estimate_needs(preflight.header, preflight.draft, preflight.n_ctx, n_ubatch)
    return choose_ram(
        options.ram, preflight.geometry, device, needs,
        cache_bytes=options.cache.n_bytes(preflight.geometry.experts_bytes),
        host_kernels=options.host_kernels, is_split=options.n_gpu_layers is not None,
    )  # fmt: skip


def _n_ubatch(options: ForwardOptions, preflight: Preflight, *, is_on_disk: bool) -> int:
    """What pays and fits where the host computes the experts; elsewhere llama.cpp's number."""
    from pyspac.engine.engine import tokens_per_expert  # loads the native library, as the rest does anyway

    if options.stock or not (is_on_disk or options.is_host_only):
        return N_UBATCH
    wanted = wanted_piece(preflight.geometry, "disk" if is_on_disk else "host", tokens_per_expert())
    return fit_piece(wanted, preflight.header, preflight.n_ctx, free_memory())
