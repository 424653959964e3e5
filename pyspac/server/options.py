"""What `pyspac serve` and `pyspac attach` were asked for, checked before anything is started."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from pyspac.checks import check_int, check_range
from pyspac.engine.ahead import check_in_engine
from pyspac.engine.params import EngineParams
from pyspac.engine.values import read_cpu_range, read_device_kind
from pyspac.errors import ConfigError, UsageError
from pyspac.forward.lossy import check_lossy
from pyspac.forward.no_device import check_no_device, is_host_only
from pyspac.forward.options import CacheSize, check_host_kernels, check_ram_goes_with, check_rpc
from pyspac.model import spec_types
from pyspac.model.memory_tier import check_ram
from pyspac.model.tensor_split import FLAG as TENSOR_SPLIT
from pyspac.model.tensor_split import check_n_numbers, parse_tensor_split
from pyspac.scheduler.baseline import check_baseline
from pyspac.scheduler.config import (
    DRAFT_MAX,
    LINK_GB_S,
    TOKEN,
    SchedulerConfig,
)
from pyspac.scheduler.policy import FLAG as POLICY
from pyspac.server.board_file import check_name
from pyspac.server.keep import check_keep
from pyspac.speculation.manager import FIXED, choose_controller, choose_draft_max, parse_controller

if TYPE_CHECKING:
    from pyspac.engine.devices import Device

MAX_PORT: Final = 65535
MAX_TOKENS: Final = 2**31 - 1  # llama.cpp counts them in 32 bits
LEAST_TOKENS: Final = 2  # of a batch and of a context: llama-server tries both with two while it loads
DEFAULT_HOST: Final = "127.0.0.1"
DEFAULT_N_DRAFT: Final = 8  # that a step of a server slot has room for, where fewer are asked for
DEFAULT_CPU_SHARE: Final = 0.02
MAX_DRAIN_S: Final = 86400.0
DEFAULT_DRAIN_S: Final = 20.0  # systemd and containers give 30 s or more before they kill
SERVER_SLOTS: Final = 4  # of llama-server, unless -np says how many
NGRAM_CACHE_MAX: Final = 8  # tokens of its drafts: create_state_ngram_cache in common/speculative.cpp

# llama-server's arguments that have to agree with ours, and how to give them instead
_OURS: Final = {
    "-m": "-m", "--model": "-m", "-md": "-md", "--model-draft": "-md", "--spec-draft-model": "-md",
    "--host": "--host", "--port": "--port", "--spac-cache": "--cache", "--spac-board": "--board",
    "--spec-draft-n-max": "--draft-max", "-dev": "--device", "--device": "--device", "--rpc": "--rpc",
    "-c": "-c", "--ctx-size": "-c", "-Cr": "--cpu-range", "--cpu-range": "--cpu-range",
}  # fmt: skip
_SHOW_AND_END: Final = (
    "-h",
    "--help",
    "--usage",
    "--version",
    "--license",
    "--list-devices",
    "-cl",
    "--cache-list",
    "--completion-bash",
)
# what names a model that llama-server fetches itself
MODEL_FLAGS: Final = ("-hf", "-hfr", "--hf-repo", "-mu", "--model-url", "-dr", "--docker-repo")
GPU_LAYERS_FLAGS: Final = ("-ngl", "--gpu-layers", "--n-gpu-layers")
TENSOR_SPLIT_FLAGS: Final = ("-ts", TENSOR_SPLIT)
THREADS_FLAGS: Final = ("-t", "--threads")
OTHER_THREADS_FLAGS: Final = (
    ("-tb", "--threads-batch"),
    ("-td", "--threads-draft", "--spec-draft-threads"),
    ("-tbd", "--threads-batch-draft", "--spec-draft-threads-batch"),
)  # of which 0 is as many as there are cores
SPLIT_MODE_FLAGS: Final = ("-sm", "--split-mode")
SEED_FLAGS: Final = ("-s", "--seed")
KEY_VARIABLES: Final = ("LLAMA_API_KEY", "LLAMA_ARG_API_KEY_FILE")
DRAFT_FLAGS: Final = ("-hfd", "-hfrd", "--hf-repo-draft", "--spec-draft-hf")


def names_draft(passed: Sequence[str]) -> bool:
    """Whether llama-server's arguments name a draft model to fetch."""
    return any(flag in passed for flag in DRAFT_FLAGS)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachOptions:
    """The scheduler's side: what it decides by, and where it can be watched."""

    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    metrics_port: int | None = None  # None: no metrics
    metrics_host: str = DEFAULT_HOST
    cpu_share: float = DEFAULT_CPU_SHARE  # of one core, that steps may take
    speculation: str = FIXED  # how long to draft: a name of pyspac.speculation.CONTROLLERS, or auto
    warm_start: bool = True
    model: Path | None = None  # whose utilities to load and save; None: no warm start
    log_json: bool = False
    spec_type: str = spec_types.NONE  # who drafts, by pyspac's name

    def __post_init__(self) -> None:
        check_range("--cpu-share", self.cpu_share, 0.001, 1)
        parse_controller(self.speculation)
        if self.metrics_port is not None:
            check_int("--metrics-port", self.metrics_port, 0, MAX_PORT)

    @property
    def n_draft_max(self) -> int:
        """The server's own limit, which none may exceed; 0: nothing drafts, as far as is known."""
        return self.scheduler.n_draft_max

    @property
    def has_controller(self) -> bool:
        """Whether draft lengths are decided here; else the server's own stays."""
        return self.speculation != FIXED


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The server's side, and the scheduler's."""

    model: Path | None = None  # None: `passed` names one, such as -hf
    draft: Path | None = None
    mtp: Path | None = None  # an adapter with mask tokens, which drafts
    spec_type: str | None = None  # as parse_spec_type returns it; None: in `passed`, or what suits
    cache: CacheSize = field(default_factory=lambda: CacheSize(text="auto"))
    ram: str | None = None  # memory for experts that stay on disk; None: as much as there is
    lossy: str | None = None  # "drop:N": what need not be exact; None: all is
    max_kl: float | None = None  # what that may cost in the mean, in nats per token; None: no limit
    device: str = "auto"
    rpc: str | None = None  # HOST:PORT of ggml-rpc-servers, with commas
    host_kernels: str = "auto"
    copy_gb_s: tuple[float, ...] = ()  # throttle of copies in 1e9 bytes/s, one of all devices or one of each
    cpu_range: str | None = None  # LO-HI, cores to stay on; None: all
    n_ctx: int | None = None
    host: str = DEFAULT_HOST
    port: int | None = None  # None: 8080; 0: any free one
    socket: Path | None = None  # listen there instead: a UNIX socket, *.sock
    stock: bool = False  # plain llama.cpp, for comparison: no engine, experts on the host
    trace: Mapping[str, str] = field(default_factory=dict)  # variables: it records, and splits nothing
    board: str | None = None  # None: server-PORT
    max_batch: int | None = None  # None: what drafts or masks need
    restart: bool = False
    drain_s: float = DEFAULT_DRAIN_S  # after SIGTERM, for answers under way
    keep: Path | None = None  # a folder for prompts that outlive the server
    keep_mib: int | None = None  # how much it may hold; None: the default
    passed: Sequence[str] = ()  # for llama-server as they are
    attach: AttachOptions = field(default_factory=AttachOptions)

    def __post_init__(self) -> None:
        check_host_kernels(self.host_kernels)
        check_ram(self.ram)
        for speed in filter(None, self.copy_gb_s):
            check_range("copy_gb_s", speed, *LINK_GB_S)
        check_rpc(self.rpc, self.device, stock=self.stock)
        if self.cpu_range is not None:
            read_cpu_range(self.cpu_range)
        self._check_mode()
        if self.n_ctx is not None:
            check_int("-c", self.n_ctx, 0, MAX_TOKENS)
            if self.n_ctx and self.n_ctx < LEAST_TOKENS:
                raise ConfigError("-c", self.n_ctx, f"{LEAST_TOKENS} or more, or 0 for the model's own")
        check_range("--drain", self.drain_s, 0, MAX_DRAIN_S)
        check_keep(self.keep, self.keep_mib)
        if self.board is not None:
            check_name(self.board)
        self._check_passed()
        if self.drafts and (self.has_draft or self.spec_type) and self.attach.n_draft_max == 0:
            raise ConfigError("--draft-max", 0, f"1 to {DRAFT_MAX}; to draft nothing, --spec-type none")
        has_draft = self.has_draft and spec_types.reads_like_target(self.wanted_spec_type)
        check_in_engine(self.attach.scheduler.predict, has_draft=has_draft)

    def _check_mode(self) -> None:
        """What goes with a device, without one, and with plain llama.cpp."""
        check_ram_goes_with(self.ram, host_kernels=self.host_kernels, stock=self.stock)
        check_lossy(self.lossy, stock=self.stock, max_kl=self.max_kl, host_kernels=self.host_kernels)
        check_baseline(POLICY, self.attach.scheduler, stock=self.stock, ram_bytes=None)
        self.cache.check_beside(stock=self.stock)
        if self.stock:
            return
        if self.is_host_only:
            check_no_device(
                host_kernels=self.host_kernels, cache=self.cache.text, scheduler=self.attach.scheduler,
                copy_gb_s=self.copy_gb_s, without_engine="use plain llama.cpp (`pyspac run --stock`)",
            )  # fmt: skip
        elif self.cache.is_zero:
            raise ConfigError(
                "--cache", self.cache.text, "more than 0; to run without a cache, use plain llama.cpp "
                "(`pyspac run --stock`)"
            )  # fmt: skip

    def _check_passed(self) -> None:
        if self.passed and not self.passed[0].startswith("-"):
            raise UsageError(
                f"{self.passed[0]!r} belongs to no option; llama-server's own options come after --"
            )
        for text in self.passed:
            flag = text.partition("=")[0]
            if flag in _OURS:
                raise UsageError(
                    f"{text} cannot be passed on, as pyspac has to know it: give {_OURS[flag]}, before any --"
                )
            if flag in _SHOW_AND_END:
                raise UsageError(f"{text} makes llama-server show something and end: give it to that program")
            if flag in MODEL_FLAGS and self.model is not None:
                raise UsageError(f"there are two models, -m {self.model} and {text}: give one")
            if flag in DRAFT_FLAGS and self.draft is not None:
                raise UsageError(f"there are two draft models, -md {self.draft} and {text}: give one")
        mode = self.passed_value(*SPLIT_MODE_FLAGS)
        if mode in ("row", "tensor"):  # a layer would have no one device
            raise UsageError(
                f"-sm {mode} is not possible, as each device gets whole layers: leave it out; -ts says "
                "which share each device gets"
            )
        parse_tensor_split(self.passed_value(*TENSOR_SPLIT_FLAGS))  # or it raises
        if self.spec_type is not None and self.passed_value("--spec-type"):
            raise UsageError("--spec-type is given twice: give it once, before any --")
        if self.spec_type is not None or self.mtp is not None:
            spec_types.check_has_draft(self.wanted_spec_type, has_draft=self.has_draft)
        spec_types.check_has_adapter(self.wanted_spec_type, has_adapter=self.mtp is not None)
        if self.model is None and not any(flag in self.passed for flag in MODEL_FLAGS):
            raise UsageError("there is no model: give FILE.gguf or USER/MODEL, before flags of llama-server")

    @property
    def tensor_split(self) -> tuple[float, ...]:
        """Shares of the layers, of each device; (): by free memory. Raises ConfigError."""
        return parse_tensor_split(self.passed_value(*TENSOR_SPLIT_FLAGS))

    @property
    def n_gpu_layers(self) -> int | None:
        """As -ngl says; None: all, or llama-server's own choice."""
        text = self.given_value("LLAMA_ARG_N_GPU_LAYERS", *GPU_LAYERS_FLAGS)
        return int(text) if text.isdecimal() else None

    @property
    def has_draft(self) -> bool:
        """Whether a model drafts: a file, or one that is fetched."""
        return self.draft is not None or names_draft(self.passed)

    @property
    def wanted_spec_type(self) -> str:
        """How to draft, by pyspac's names."""
        if "sd" in self.attach.scheduler.without:
            return spec_types.NONE
        if given := self.spec_type or self.passed_value("--spec-type"):
            return given
        if self.mtp is not None:
            return spec_types.DRAFT_LORA
        return spec_types.DRAFT if self.has_draft else spec_types.NONE

    @property
    def drafts(self) -> bool:
        return self.wanted_spec_type != spec_types.NONE

    def on(self, device: Device) -> Self:
        """The same on the device that was found. Raises UsageError for what it cannot have."""
        if len(device.handles) > 1 and self.passed_value(*SPLIT_MODE_FLAGS) == "none":
            raise UsageError(
                f"-sm none uses one device, and there are {len(device.handles)} ({device.name}): name one "
                "device with --device, and leave out -sm and -mg"
            )
        if device.has_cache and not (self.is_host_only or self.stock):
            self.cache.of_devices(len(device.each))
        check_n_numbers(TENSOR_SPLIT, self.tensor_split, len(device.handles), device)
        if not device.has_cache and not self.is_host_only:
            return replace(self, device="none")
        check_n_numbers("copy_gb_s", self.copy_gb_s[1:] and self.copy_gb_s, len(device.each), device)
        is_auto = read_device_kind(self.device) == "auto"
        return self if is_auto or not (device.parts or self.rpc) else replace(self, device=device.name)

    @property
    def is_open(self) -> bool:
        """Whether other machines may use it, and no key is asked for."""
        has_key = any(os.environ.get(name) for name in KEY_VARIABLES) or self.passed_value("--api-key-file")
        return not has_key and not _is_loopback(self.host)

    @property
    def api_prefix(self) -> str:
        """Of every path."""
        return self.given_value("LLAMA_ARG_API_PREFIX", "--api-prefix")

    @property
    def is_tls(self) -> bool:
        """Whether it is reached by HTTPS."""
        names = (("LLAMA_ARG_SSL_KEY_FILE", "--ssl-key-file"), ("LLAMA_ARG_SSL_CERT_FILE", "--ssl-cert-file"))
        return all(self.given_value(*name) for name in names)

    @property
    def is_host_only(self) -> bool:
        """No device: the engine's kernels compute every expert on the host, prompts included."""
        return is_host_only(self.device)

    @property
    def is_emulated(self) -> bool:
        """The CPU plays the device."""
        return read_device_kind(self.device) == "emulated"

    @property
    def has_scheduler(self) -> bool:
        """Without slots there are only draft lengths to choose, metrics to serve, experts to read ahead."""
        is_asked = (
            self.attach.has_controller
            or self.attach.metrics_port is not None
            or TOKEN in self.attach.scheduler.predict
        )
        return not self.stock and (not self.is_host_only or is_asked)

    @property
    def default_max_batch(self) -> int:
        """Tokens of a step: each server slot's drafts and one, without masks; the engine may split fewer."""
        width = 1 + max(DEFAULT_N_DRAFT, self.attach.n_draft_max)
        return max(EngineParams().max_batch, self.n_server_slots * width)

    @property
    def n_server_slots(self) -> int:
        """As -np says, or llama-server's variable, or its own choice."""
        text = self.given_value("LLAMA_ARG_N_PARALLEL", "-np", "--parallel")
        return int(text) if text.isdecimal() else SERVER_SLOTS

    def given_value(self, variable: str, *flags: str) -> str:
        """The value after one of `flags`, or else of llama-server's variable; "": neither is given."""
        return self.passed_value(*flags) or os.environ.get(variable, "")

    def passed_value(self, *flags: str, default: str = "") -> str:
        """The value after one of `flags` in what is passed on: the last, as llama-server takes it."""
        pairs = pairwise((*self.passed, default))
        return next((value for flag, value in reversed(list(pairs)) if flag in flags), default)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".sock")


def choose_drafting(
    speculation: str | None, draft_max: int | None, *, lowest: int = 1, must_repeat: bool = False
) -> tuple[str, int]:
    """Who decides how long to draft, and the limit, `lowest` or more. Raises ConfigError."""
    if draft_max is not None:
        check_int("--draft-max", draft_max, lowest, DRAFT_MAX)
    controller = choose_controller(speculation, draft_max, must_repeat=must_repeat)
    return controller, choose_draft_max(draft_max, controller)


def drafting_of(
    spec_type: str | None,
    passed: Sequence[str],
    speculation: str | None,
    draft_max: int | None,
    *,
    has_draft: bool,
) -> tuple[str, int]:
    """As `choose_drafting`; (static, 0) where nothing drafts, or llama-server by its own lengths.

    It keeps its own lengths where only flags after -- name its drafter. Raises ConfigError.
    """
    is_asked = speculation is not None or draft_max is not None
    drafts = spec_type != spec_types.NONE and (spec_type is not None or has_draft)
    if drafts or (is_asked and spec_type is None and "--spec-type" in passed):
        if "ngram-cache" in (spec_type or "") and choose_controller(speculation, draft_max) == FIXED:
            _check_cache_length(draft_max)
        return choose_drafting(speculation, draft_max, must_repeat=_has_seed(passed))
    if is_asked:
        flag, value = ("--draft-max", draft_max) if speculation is None else ("--speculation", speculation)
        raise UsageError(
            f"{flag} {value} has no effect, as nothing drafts: give a draft model with -md FILE, or "
            "--spec-type ngram"
        )
    return FIXED, 0


def _has_seed(passed: Sequence[str]) -> bool:
    """Whether sampled text has to repeat: drafts must not depend on measured times then."""
    return any(flag in SEED_FLAGS and value != "-1" for flag, value in pairwise((*passed, "")))


def _check_cache_length(draft_max: int | None) -> None:
    """Raise UsageError for a fixed length that llama-server's ngram-cache cannot be given."""
    if draft_max is not None and draft_max < NGRAM_CACHE_MAX:
        raise UsageError(
            f"--draft-max {draft_max}: llama-server's ngram-cache always drafts {NGRAM_CACHE_MAX} tokens; "
            "add --speculation auto, which holds it below, or choose another --spec-type"
        )
