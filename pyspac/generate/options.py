"""What a run was asked for: every setting of `pyspac run`, checked before anything is opened."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from pyspac.checks import check_range
from pyspac.engine.cpus import parse_cpu_range
from pyspac.engine.params import HOST_KERNELS, EngineParams
from pyspac.errors import ConfigError
from pyspac.generate.sampling import SamplingParams
from pyspac.scheduler.config import LINK_GB_S, SchedulerConfig
from pyspac.speculation.manager import FIXED, choose_controller
from pyspac.units import MIB

SpecType = Literal["draft", "ngram", "none"]

DEFAULT_N_CTX: Final = 4096
DEFAULT_DRAFT_MAX: Final = 4  # of a fixed draft length
DEFAULT_DRAFT_CAP: Final = 8  # of one that is controlled


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSize:
    """Device memory for the experts' slots: a share of all experts' bytes, MiB, or what is free."""

    text: str  # as given: "17%", a number of MiB, "auto", "0"

    def __post_init__(self) -> None:
        if self.text != "auto" and not re.fullmatch(r"\d+(\.\d+)?%?", self.text):
            raise ConfigError(
                "--cache", self.text, "a share such as 17%, a number of MiB, auto, or 0 with --stock"
            )
        if self.text.endswith("%") and float(self.text[:-1]) > 100:
            raise ConfigError("--cache", self.text, "0% .. 100% of the experts' bytes")

    @property
    def is_zero(self) -> bool:
        return self.text != "auto" and float(self.text.rstrip("%")) == 0

    def n_bytes(self, experts_bytes: int) -> int | None:
        """Bytes, given those of all experts; None: whatever is free."""
        if self.text == "auto":
            return None
        if self.text.endswith("%"):
            return int(float(self.text[:-1]) / 100 * experts_bytes)
        return int(float(self.text) * MIB)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The settings of one run. `None` means: not given, take what suits."""

    model: Path
    draft: Path | None = None
    n_predict: int = -1  # -1: until the end token
    n_ctx: int | None = None
    n_threads: int | None = None
    n_gpu_layers: int | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stock: bool = False  # without the engine: the same graph, batches and weights' layout as plain llama.cpp
    repack: bool = False  # stock only: let llama.cpp repack weights for the CPU
    device: str = "auto"
    host_kernels: str = EngineParams().host_kernels
    cpu_range: str | None = None  # LO-HI, cores to stay on; None: all
    rpc: str | None = None
    cache: CacheSize = field(default_factory=lambda: CacheSize(text="auto"))
    spec_type: SpecType | None = None
    draft_max: int | None = None
    draft_p_min: float = 0.0  # of the draft model
    speculation: str | None = None  # a name of pyspac.speculation.CONTROLLERS, or auto; see choose_controller
    explain: bool = False
    estimator: str = SchedulerConfig().estimator
    threshold: int | None = None  # None: balanced
    without: frozenset[str] = frozenset()  # of pyspac.scheduler.config.ABLATIONS
    copy_gb_s: float = 0.0  # throttle of copies, in 1e9 bytes/s; 0: none
    link_gb_s: float | None = None  # known speed of the link, in 1e9 bytes/s; None: measured while running
    max_batch: int = EngineParams().max_batch
    verbose: bool = False

    def __post_init__(self) -> None:
        _check_at_least("-n", self.n_predict, -1)
        _check_at_least("-c", self.n_ctx, 0)
        _check_at_least("-t", self.n_threads, 1)
        _check_at_least("-ngl", self.n_gpu_layers, -1)
        check_link_gb_s(self.link_gb_s)
        if self.copy_gb_s != 0:
            check_range("--copy-gb-s", self.copy_gb_s, *LINK_GB_S)
        check_host_kernels(self.host_kernels)
        if self.cpu_range is not None:
            parse_cpu_range(self.cpu_range)
        self._check_speculation()
        self._check_mode()
        self.scheduler_config()

    def _check_speculation(self) -> None:
        if self.spec_type == "draft" and self.draft is None:
            raise ConfigError("--spec-type", "draft", "a draft model too, with -md; or ngram, or none")
        if self.spec_type in ("ngram", "none") and self.draft is not None:
            raise ConfigError("--spec-type", self.spec_type, "draft, as -md is given; or leave -md out")
        if self.draft_max is not None and not 1 <= self.draft_max < self.max_batch:
            raise ConfigError(
                "--draft-max", self.draft_max, f"1 .. {self.max_batch - 1}; for none, --spec-type none"
            )
        if self.draft_max is not None and self.wanted_spec_type == "none":
            raise ConfigError(
                "--draft-max", self.draft_max, "only with a draft model (-md) or --spec-type ngram"
            )
        if self.speculation is not None and self.wanted_spec_type == "none":
            raise ConfigError(
                "--speculation", self.speculation, "only with a draft model (-md) or --spec-type ngram"
            )
        if not 0.0 <= self.draft_p_min <= 1.0:
            raise ConfigError("--draft-p-min", self.draft_p_min, "a probability, 0 .. 1")
        if self.draft_p_min > 0.0 and self.wanted_spec_type != "draft":
            raise ConfigError("--draft-p-min", self.draft_p_min, "only with a draft model (-md)")
        choose_controller(self.speculation, self.draft_max)

    def _check_mode(self) -> None:
        if self.repack and not self.stock:
            raise ConfigError(
                "--repack", True, "only with --stock: the split needs the file's own layout of weights"
            )
        if self.stock:
            return
        if self.is_host_only:
            if self.rpc:
                raise ConfigError("--device", "none", "auto or an RPC device's name, as --rpc is given")
            check_host_only(self.host_kernels, self.cache, without_engine="--stock")
            return
        if self.cache.is_zero:
            raise ConfigError("--cache", self.cache.text, "more than 0; to run without a cache, add --stock")
        if self.rpc and self.device == "cpu":
            raise ConfigError("--device", "cpu", "auto or an RPC device's name, as --rpc is given")

    @property
    def is_host_only(self) -> bool:
        """No device: the engine's kernels compute every expert on the host, prompts included."""
        return is_host_only(self.device)

    @property
    def wanted_spec_type(self) -> SpecType:
        """How to draft, before the ablation `sd`."""
        return self.spec_type or ("draft" if self.draft else "none")

    @property
    def effective_spec_type(self) -> SpecType:
        return "none" if "sd" in self.without else self.wanted_spec_type

    @property
    def effective_draft_max(self) -> int:
        """Tokens drafted per step at most; 0: plain decoding."""
        if self.effective_spec_type == "none":
            return 0
        return choose_draft_max(self.draft_max, self.controller)

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
            threshold="auto" if self.threshold is None else self.threshold,
            without=self.without,
            n_draft_max=self.effective_draft_max,
            link_gb_s=self.link_gb_s,
        )

    def engine_params(self, device: str) -> EngineParams:
        return EngineParams(
            device=device,
            cache=self.cache.text,
            n_threads=self.n_threads or 0,
            max_batch=self.max_batch,
            copy_gb_s=self.copy_gb_s,
            evict="evict" not in self.without,
            fill="prefetch" not in self.without,
            host_kernels=self.host_kernels,
            cpu_range=self.cpu_range,
            verbose=self.verbose,
        )


def choose_draft_max(wanted: int | None, controller: str) -> int:
    """Tokens drafted per step at most, if anything drafts."""
    if wanted is not None:
        return wanted
    return DEFAULT_DRAFT_MAX if controller == FIXED else DEFAULT_DRAFT_CAP


def check_link_gb_s(value: float | None) -> None:
    """Raises ConfigError."""
    if value is not None:
        check_range("--link-gb-s", value, *LINK_GB_S)


def is_host_only(device: str) -> bool:
    """Whether `--device` asks for none."""
    return device.lower() == "none"


def check_host_kernels(name: str) -> None:
    """Raises ConfigError."""
    if name not in HOST_KERNELS:
        raise ConfigError("--host-kernels", name, ", ".join(HOST_KERNELS))


def check_host_only(host_kernels: str, cache: CacheSize, without_engine: str) -> None:
    """Raise ConfigError for what --device none cannot have; `without_engine`: how to run ggml's kernels."""
    if host_kernels == "ggml":
        raise ConfigError("--host-kernels", "ggml", f"auto or spac with --device none; or {without_engine}")
    if cache.text not in ("auto", "0"):
        raise ConfigError("--cache", cache.text, "nothing, as --device none has no slots")


def _check_at_least(name: str, value: float | None, low: float) -> None:
    if value is not None and value < low:
        raise ConfigError(name, value, f"{low} or more")
