"""How a model is loaded and where its experts are: checked before anything is opened."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from pyspac.checks import check_int, check_range
from pyspac.engine.ahead import NEXT_LAYERS
from pyspac.engine.params import HOST_KERNELS, EngineParams
from pyspac.engine.rpc import split_endpoints
from pyspac.engine.values import read_device_kind, read_size
from pyspac.errors import ConfigError, UsageError
from pyspac.forward.no_device import can_predict, check_no_device, is_host_only
from pyspac.model.memory_tier import check_ram
from pyspac.model.tensor_split import check_shares
from pyspac.scheduler.config import LINK_GB_S, SchedulerConfig

if TYPE_CHECKING:
    from pyspac.engine.devices import Device

DEFAULT_N_CTX: Final = 4096
_MANY: Final = 2**31 - 1  # llama.cpp counts tokens, threads and layers in 32 bits
_MANY_BYTES: Final = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSize:
    """Device memory for the experts' slots: a share of its layers' experts, MiB, or what is free.

    One for all devices, or with commas one for each.
    """

    text: str  # as given: "17%", a number of MiB, "auto", "0", "8000,25%"

    def __post_init__(self) -> None:
        """Raises UsageError if it is none."""
        self.n_bytes(0)

    @property
    def sizes(self) -> list[str]:
        return self.text.split(",")

    @property
    def is_zero(self) -> bool:
        """Whether a device would have none."""
        return any(read_size("--cache", size, _MANY_BYTES) == 0 for size in self.sizes)

    def check_beside(self, *, stock: bool) -> None:
        """Raise UsageError if a size is asked for beside plain llama.cpp."""
        if stock and self.text not in ("auto", "0"):
            raise UsageError(f"--cache {self.text} has no effect with --stock, which has none: omit one")

    def n_bytes(self, experts_bytes: int) -> int | None:
        """Bytes, given those of all experts; None: whatever is free. Of several, as if layers were dealt out
        equally.
        """
        found = [read_size("--cache", size, experts_bytes // len(self.sizes)) for size in self.sizes]
        return None if None in found else sum(size or 0 for size in found)

    def of_devices(self, n_devices: int) -> list[str]:
        """The size of each device. Raises UsageError where there are more or fewer, and not one for all."""
        if len(self.sizes) == 1:
            return self.sizes * n_devices
        if len(self.sizes) != n_devices:
            there = "is one device" if n_devices == 1 else f"are {n_devices} devices"
            raise UsageError(
                f"--cache {self.text} has {len(self.sizes)} sizes, and there {there}: give one for each, or "
                "one for all"
            )
        return self.sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOptions:
    """One model and where it computes. `None` means: not given, take what suits."""

    model: Path
    draft: Path | None = None  # a model that will be loaded beside it
    n_ctx: int | None = None
    n_sequences: int = 1  # of n_ctx tokens each
    width: int = 1  # tokens of each sequence that a pass may have logits of, and take back
    n_threads: int | None = None
    n_gpu_layers: int | None = None
    stock: bool = False  # without the engine: the same graph, batches and weights' layout as plain llama.cpp
    repack: bool = False  # stock only: let llama.cpp repack weights for the CPU
    device: str = "auto"
    host_kernels: str = EngineParams().host_kernels
    rpc: str | None = None
    tensor_split: tuple[float, ...] = ()  # shares of the layers, of each device; (): by free memory
    cache: CacheSize = field(default_factory=lambda: CacheSize(text="auto"))
    scheduler: SchedulerConfig = field(default_factory=lambda: SchedulerConfig(n_draft_max=0))
    ram: str | None = None  # memory for experts that stay on disk; None: as much as there is
    copy_gb_s: float = 0.0  # throttle of copies, in 1e9 bytes/s; 0: none
    max_batch: int = EngineParams().max_batch
    verbose: bool = False

    def __post_init__(self) -> None:
        for name, value, low in (
            ("-c", self.n_ctx, 0), ("-t", self.n_threads, 1), ("-ngl", self.n_gpu_layers, -1)
        ):  # fmt: skip
            if value is not None:
                check_int(name, value, low, _MANY)
        if self.copy_gb_s:
            check_range("--copy-gb-s", self.copy_gb_s, *LINK_GB_S)
        check_shares(self.tensor_split)
        check_host_kernels(self.host_kernels)
        check_ram(self.ram)
        check_rpc(self.rpc, self.device, stock=self.stock)
        self._check_mode()

    def _check_mode(self) -> None:
        check_ram_goes_with(self.ram, host_kernels=self.host_kernels, stock=self.stock)
        if self.repack and not self.stock:
            raise UsageError("--repack needs --stock: the split uses the weights as they lie in the file")
        if self.stock:
            return
        if self.is_host_only:
            check_no_device(
                host_kernels=self.host_kernels, cache=self.cache.text, scheduler=self.scheduler,
                copy_gb_s=(self.copy_gb_s,), without_engine="add --stock",
            )  # fmt: skip
        elif self.cache.is_zero:
            raise ConfigError("--cache", self.cache.text, "more than 0; to run without a cache, add --stock")

    def on(self, device: Device) -> Self:
        """The same on the device that was found. Raises UsageError for what it cannot have."""
        if device.has_cache and not (self.stock or self.is_host_only):
            self.cache.of_devices(len(device.each))
        return self if device.has_cache or self.is_host_only else replace(self, device="none")

    @property
    def is_host_only(self) -> bool:
        """No device: the engine's kernels compute every expert on the host, prompts included."""
        return is_host_only(self.device)

    def engine_params(self, device: str, ram_bytes: int | None = None) -> EngineParams:
        without, predict = self.scheduler.without, self.scheduler.predict
        can = can_predict(is_host_only=device == "none", ram_bytes=ram_bytes)
        return EngineParams(
            device=device,
            cache=self.cache.text,
            n_threads=self.n_threads or 0,
            max_batch=max(self.max_batch, self.width),
            ram_bytes=ram_bytes or 0,
            copy_gb_s=self.copy_gb_s,
            evict="evict" not in without,
            fill=not {"prefetch", "prompt"} & without,
            stage="never" if {"prefetch", "prompt", "stage"} & without else "auto",
            next_layer=max((NEXT_LAYERS.get(name, 0) for name in predict), default=0) if can else 0,
            host_kernels=self.host_kernels,
            verbose=self.verbose,
        )


def check_ram_goes_with(ram: str | None, *, host_kernels: str, stock: bool) -> None:
    """Raise UsageError where experts cannot stay on disk."""
    if ram is not None and stock:
        raise UsageError(f"--ram {ram} has no effect with --stock, which maps the file: leave it out")
    if ram is not None and host_kernels == "ggml":
        raise UsageError(
            f"--ram {ram} needs the engine's own kernels, as ggml's read experts from the mapped file: leave "
            "out --host-kernels ggml"
        )


def check_rpc(rpc: str | None, device: str, *, stock: bool) -> None:
    """Raise ConfigError for what names no servers, UsageError where their devices would not be used."""
    if rpc is None:
        return
    split_endpoints(rpc)  # or it raises
    if not stock and read_device_kind(device) in ("emulated", "none"):
        raise UsageError(f"--rpc needs --device auto or its device's name, not {device}")


def check_host_kernels(name: str) -> None:
    """Raises ConfigError."""
    if name not in HOST_KERNELS:
        raise ConfigError("--host-kernels", name, f"one of {', '.join(HOST_KERNELS)}")
