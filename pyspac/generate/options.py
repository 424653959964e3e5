"""What a run was asked for: every setting of `pyspac run`, checked before anything is opened."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, Self

from pyspac.checks import check_range
from pyspac.engine.ahead import NEXT_LAYERS, check_in_engine
from pyspac.engine.params import HOST_KERNELS, EngineParams
from pyspac.engine.rpc import split_endpoints
from pyspac.engine.values import read_cache_size, read_cpu_range, read_device_kind
from pyspac.errors import ConfigError, UsageError
from pyspac.forward.no_device import can_predict, check_no_device, is_host_only
from pyspac.generate.sampling import SamplingParams
from pyspac.model import spec_types
from pyspac.model.memory_tier import check_ram, ram_text
from pyspac.model.tensor_split import check_n_numbers, check_shares
from pyspac.scheduler.config import LINK_GB_S, SchedulerConfig
from pyspac.speculation.cost_table import masked_width
from pyspac.speculation.manager import FIXED, choose_controller

if TYPE_CHECKING:
    from pyspac.engine.devices import Device

Threshold = int | Literal["auto"]

DEFAULT_N_CTX: Final = 4096
DEFAULT_DRAFT_MAX: Final = 4  # of a fixed draft length
DEFAULT_DRAFT_CAP: Final = 8  # of one that is controlled
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
        return any(read_cache_size(size, _MANY_BYTES) == 0 for size in self.sizes)

    def n_bytes(self, experts_bytes: int) -> int | None:
        """Bytes, given those of all experts; None: whatever is free. Of several, as if layers were dealt out
        equally.
        """
        found = [read_cache_size(size, experts_bytes // len(self.sizes)) for size in self.sizes]
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
class RunOptions:
    """The settings of one run. `None` means: not given, take what suits."""

    model: Path
    draft: Path | None = None
    mtp: Path | None = None  # an adapter with mask tokens, which drafts
    n_masks: int | None = None  # of that adapter, once it was read
    n_predict: int = -1  # -1: until the end token
    n_ctx: int | None = None
    n_sequences: int = 1  # of n_ctx tokens each; more than one for measurements alone
    n_threads: int | None = None
    n_gpu_layers: int | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stock: bool = False  # without the engine: the same graph, batches and weights' layout as plain llama.cpp
    repack: bool = False  # stock only: let llama.cpp repack weights for the CPU
    n_cpu_moe: int | None = None  # stock only: the first layers, whose experts stay on the host; None: all
    device: str = "auto"
    host_kernels: str = EngineParams().host_kernels
    cpu_range: str | None = None  # LO-HI, cores to stay on; None: all
    rpc: str | None = None
    tensor_split: tuple[float, ...] = ()  # shares of the layers, of each device; (): by free memory
    cache: CacheSize = field(default_factory=lambda: CacheSize(text="auto"))
    spec_type: str | None = None  # as parse_spec_type returns it; None: draft with a draft model, else none
    draft_max: int | None = None
    draft_p_min: float = 0.0  # of the draft model or head
    speculation: str | None = None  # a name of pyspac.speculation.CONTROLLERS, or auto; see choose_controller
    explain: bool = False
    estimator: str = SchedulerConfig().estimator
    threshold: Threshold = "auto"  # auto: balanced
    without: frozenset[str] = frozenset()  # of pyspac.scheduler.config.PARTS
    predict: tuple[str, ...] = SchedulerConfig().predict  # of pyspac.scheduler.config.PREDICTORS
    ram: str | None = None  # memory for experts that stay on disk; None: as much as there is
    copy_gb_s: float = 0.0  # throttle of copies, in 1e9 bytes/s; 0: none
    device_copy_gb_s: tuple[float, ...] = ()  # the same, of each device, or one of all
    link_gb_s: float | None = None  # known speed of the link, in 1e9 bytes/s; None: measured while running
    max_batch: int = EngineParams().max_batch
    verbose: bool = False
    profile: str | None = None  # as flags: what was saved as the model's defaults, if it is in force

    def __post_init__(self) -> None:
        _check_at_least("-n", self.n_predict, -1)
        _check_at_least("-c", self.n_ctx, 0)
        _check_at_least("-t", self.n_threads, 1)
        _check_at_least("-ngl", self.n_gpu_layers, -1)
        check_link_gb_s(self.link_gb_s)
        for speed in filter(None, (self.copy_gb_s, *self.device_copy_gb_s)):
            check_range("--copy-gb-s", speed, *LINK_GB_S)
        check_shares(self.tensor_split)
        check_host_kernels(self.host_kernels)
        if self.cpu_range is not None:
            read_cpu_range(self.cpu_range)
        check_ram(self.ram)
        if self.rpc is not None:
            split_endpoints(self.rpc)  # or it raises
        self._check_speculation()
        self._check_mode()
        self.scheduler_config()
        if not self.stock:
            has_draft = spec_types.reads_like_target(self.effective_spec_type)
            check_in_engine(self.predict, has_draft=has_draft)

    def _check_speculation(self) -> None:
        spec_types.check_in_process(self.wanted_spec_type)
        spec_types.check_has_draft(self.wanted_spec_type, has_draft=self.draft is not None)
        spec_types.check_has_adapter(self.wanted_spec_type, has_adapter=self.mtp is not None)
        longest = self.max_batch - 1
        if self.draft_max is not None and not 1 <= self.draft_max <= longest:
            wanted = f"a whole number from 1 to {longest}, or --spec-type none"
            raise ConfigError("--draft-max", self.draft_max, wanted)
        check_range("--draft-p-min", self.draft_p_min, 0.0, 1.0)
        self._check_drafter()
        choose_controller(self.speculation, self.draft_max)

    def _check_drafter(self) -> None:
        """What says how to draft needs somebody who drafts."""
        if self.wanted_spec_type == spec_types.NONE:
            for flag, value in (("--draft-max", self.draft_max), ("--speculation", self.speculation)):
                if value is not None:
                    raise UsageError(
                        f"{flag} {value} has no effect, as nothing drafts: give a draft model with -md, or "
                        "--spec-type ngram"
                    )
        if self.draft_p_min > 0.0 and self.uses_masks:
            raise UsageError(
                f"--draft-p-min {self.draft_p_min:g} has no effect with --mtp, whose drafts have no "
                "probabilities: leave it out"
            )
        if self.draft_p_min > 0.0 and spec_types.is_free(self.wanted_spec_type):
            raise UsageError(f"--draft-p-min {self.draft_p_min:g} needs a draft model: give one with -md")

    def _check_mode(self) -> None:
        if self.ram is not None and self.stock:
            raise UsageError(
                f"--ram {self.ram} has no effect with --stock, which maps the file: leave it out"
            )
        if self.ram is not None and self.host_kernels == "ggml":
            raise UsageError(
                f"--ram {self.ram} needs the engine's own kernels, as ggml's read experts from the mapped "
                "file: leave out --host-kernels ggml"
            )
        if self.repack and not self.stock:
            raise UsageError("--repack needs --stock: the split uses the weights as they lie in the file")
        if self.stock:
            return
        if self.rpc and read_device_kind(self.device) in ("emulated", "none"):
            raise UsageError(f"--rpc needs --device auto or its device's name, not {self.device}")
        if self.is_host_only:
            check_no_device(
                host_kernels=self.host_kernels, cache=self.cache.text, scheduler=self.scheduler_config(),
                copy_gb_s=self.device_copy_gb_s or (self.copy_gb_s,), without_engine="add --stock",
            )  # fmt: skip
        elif self.cache.is_zero:
            raise ConfigError("--cache", self.cache.text, "more than 0; to run without a cache, add --stock")

    def on(self, device: Device) -> Self:
        """The same on the device that was found. Raises UsageError for what it cannot have."""
        self._check_lists(device)
        return self if device.has_cache or self.is_host_only else replace(self, device="none")

    def _check_lists(self, device: Device) -> None:
        """Where something is given for each device, it has to be for all of them."""
        if not (device.has_cache or self.stock):
            return  # `check_no_device` says what is wrong
        if not (self.stock or self.is_host_only):
            self.cache.of_devices(len(device.each))
        speeds = self.device_copy_gb_s[1:] and self.device_copy_gb_s
        check_n_numbers("--copy-gb-s", speeds, len(device.each), device)

    @property
    def is_host_only(self) -> bool:
        """No device: the engine's kernels compute every expert on the host, prompts included."""
        return is_host_only(self.device)

    @property
    def wanted_spec_type(self) -> str:
        """How to draft, before the ablation `sd`."""
        if self.spec_type is None and self.mtp is not None:
            return spec_types.DRAFT_LORA
        return self.spec_type or (spec_types.DRAFT if self.draft else spec_types.NONE)

    @property
    def effective_spec_type(self) -> str:
        return spec_types.NONE if "sd" in self.without else self.wanted_spec_type

    @property
    def effective_draft_max(self) -> int:
        """Tokens drafted per step at most; 0: plain decoding."""
        if self.effective_spec_type == spec_types.NONE:
            return 0
        wanted = choose_draft_max(self.draft_max, self.controller)
        return wanted if self.n_masks is None else min(wanted, self.n_masks)

    @property
    def uses_masks(self) -> bool:
        return self.effective_spec_type == spec_types.DRAFT_LORA

    @property
    def pass_width(self) -> int:
        """Tokens of the widest pass that verifies drafts."""
        n = self.effective_draft_max
        return masked_width(n, n) if self.uses_masks else 1 + n

    @property
    def controller(self) -> str:
        """Who decides how long to draft; a seed means that sampled text has to repeat."""
        must_repeat = self.sampling.temp > 0 and self.sampling.seed >= 0
        return choose_controller(self.speculation, self.draft_max, must_repeat=must_repeat)

    @property
    def has_controller(self) -> bool:
        """Whether the draft length changes while the run lasts."""
        return self.effective_draft_max > 0 and self.controller != FIXED

    def scheduler_config(self) -> SchedulerConfig:
        return SchedulerConfig(
            estimator=self.estimator,
            threshold=self.threshold,
            without=self.without,
            predict=self.predict,
            n_draft_max=self.effective_draft_max,
            link_gb_s=self.link_gb_s,
        )

    def engine_params(self, device: str, ram_mib: float | None = None) -> EngineParams:
        can = can_predict(is_host_only=device == "none", ram_mib=ram_mib)
        return EngineParams(
            device=device,
            cache=self.cache.text,
            n_threads=self.n_threads or 0,
            max_batch=max(self.max_batch, self.pass_width),
            ram=None if ram_mib is None else ram_text(ram_mib),
            copy_gb_s=self.copy_gb_s if len(self.device_copy_gb_s) != 1 else self.device_copy_gb_s[0],
            device_copy_gb_s=self.device_copy_gb_s if len(self.device_copy_gb_s) > 1 else (),
            evict="evict" not in self.without,
            next_layer=max((NEXT_LAYERS.get(name, 0) for name in self.predict), default=0) if can else 0,
            fill=not {"prefetch", "prompt"} & self.without,
            stage="never" if {"prefetch", "prompt", "stage"} & self.without else "auto",
            host_kernels=self.host_kernels,
            cpu_range=self.cpu_range,
            verbose=self.verbose,
        )


def choose_draft_max(wanted: int | None, controller: str) -> int:
    """Tokens drafted per step at most, if anything drafts."""
    if wanted is not None:
        return wanted
    return DEFAULT_DRAFT_MAX if controller == FIXED else DEFAULT_DRAFT_CAP


def parse_threshold(text: str) -> Threshold:
    """Raises ConfigError."""
    if text == "auto":
        return "auto"
    if not text.isdecimal():
        raise ConfigError("--threshold", text, "auto, or a whole number from 1")
    return int(text)


def check_link_gb_s(value: float | None) -> None:
    """Raises ConfigError."""
    if value is not None:
        check_range("--link-gb-s", value, *LINK_GB_S)


def check_host_kernels(name: str) -> None:
    """Raises ConfigError."""
    if name not in HOST_KERNELS:
        raise ConfigError("--host-kernels", name, f"one of {', '.join(HOST_KERNELS)}")


def _check_at_least(name: str, value: int | None, low: int) -> None:
    if value is not None and value < low:
        raise ConfigError(name, value, f"{low} or more")
    if value is not None and value > _MANY:
        raise ConfigError(name, value, f"{_MANY} or less")


def parse_numbers(flag: str, text: str) -> tuple[float, ...]:
    """The numbers of "20,2"; none of "". Raises ConfigError."""
    try:
        return tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise ConfigError(flag, text, "a number, or several with commas, such as 20,2") from None
