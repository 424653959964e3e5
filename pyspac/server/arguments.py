"""`ServeOptions` in, the command lines of the two children out."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pyspac.engine.ahead import in_engine
from pyspac.engine.cpus import default_n_threads
from pyspac.engine.limits import MAX_BATCH
from pyspac.engine.rpc import split_endpoints
from pyspac.engine.values import read_cpu_range, read_device_kind
from pyspac.forward.lossy import MAX_KL_VARIABLE
from pyspac.forward.lossy import VARIABLE as LOSSY
from pyspac.forward.no_device import can_predict
from pyspac.model.device_needs import N_UBATCH
from pyspac.model.memory_tier import VARIABLE
from pyspac.model.spec_types import NGRAM, names_of
from pyspac.model.tensor_split import text_of
from pyspac.scheduler.baseline import VARIABLE as BASELINE
from pyspac.server.at_once import given_ubatch
from pyspac.server.options import KEY_VARIABLES, THREADS_FLAGS, ServeOptions
from pyspac.server.spec_flags import in_server, length_flags, mask_flags

PAGE_FOLDER: Final = Path(__file__).parent / "page"
_PAGE_FLAGS: Final = ("--path", "--no-ui", "--no-webui")
CPU: Final = "CPU"  # its name as a device
HUGE_PAGES: Final = "glibc.malloc.hugetlb=1"  # transparent ones, for all that malloc takes
# of a server that others use; one on a private socket has none of it
FOR_OTHERS: Final = (
    *KEY_VARIABLES, "LLAMA_ARG_API_PREFIX", "LLAMA_ARG_SSL_KEY_FILE", "LLAMA_ARG_SSL_CERT_FILE",
    "LLAMA_ARG_HOST", "LLAMA_ARG_PORT", "LLAMA_ARG_N_PARALLEL", "LLAMA_ARG_CACHE_RAM",
    "PYSPAC_MTP", "PYSPAC_MASKS", "PYSPAC_NGRAM", "PYSPAC_MAX_BATCH", "PYSPAC_PREDICT", "PYSPAC_EVICT",
    "PYSPAC_FILL", "PYSPAC_BASELINE", "PYSPAC_LOSSY", "PYSPAC_MAX_KL", "PYSPAC_STAGE", "PYSPAC_HOST_KERNELS",
    "PYSPAC_COPY_GB_S", "PYSPAC_CPU_RANGE",
)  # fmt: skip
READ_BY_FLAGS: Final = (
    "LLAMA_ARG_DEVICE",
    "LLAMA_ARG_RPC",
)  # of commands that have them; for others they are not
_PART: Final = re.compile(r"-\d{5}-of-\d{5}$")  # how the name of a split model's file ends
TIMEOUT_S: Final = 30  # without a byte from a client that sends or reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What was chosen for one start: addresses, names, sizes."""

    port: int
    board: str
    cache: str  # as llama-server's --spac-cache takes it
    devices: str | None = None  # what auto stands for, by name: servers' devices, or several GPUs
    n_devices: tuple[int, ...] = ()  # of each RPC server
    n_ctx: int | None = None  # None: llama-server's own choice
    n_ubatch: int = N_UBATCH  # tokens of a prompt computed at once; not passed on where the user says it
    is_copied: bool = False  # weights are copied out of the file, which stays mapped otherwise
    model_bytes: int = 0  # of its weights, in all of its files
    has_engine: bool = True  # False: llama-server as it is
    ram_bytes: int | None = None  # memory for experts that stay on disk; None: all are loaded
    device: str = ""  # the name of what was found
    has_page: bool = True  # the build's llama-server has its web page
    model: Path | None = None  # the model's file, where llama-server fetches it (-hf)

    @property
    def is_cpu(self) -> bool:
        """No device was found, or it is emulated."""
        return self.device == CPU


def server_argv(options: ServeOptions, launch: Launch, folder: Path) -> list[str]:
    """The command line of llama-server."""
    argv = [str(folder / "llama-server")]
    if options.model is not None:
        argv += ["-m", str(options.model)]
    if options.draft is not None:
        argv += ["-md", str(options.draft)]
    argv += _draft_arguments(options)
    argv += _core_arguments(options)
    if launch.n_ctx is not None:
        argv += ["-c", str(launch.n_ctx)]
    if launch.n_ubatch != N_UBATCH and given_ubatch(options) is None:
        argv += ["-ub", str(launch.n_ubatch)]
    if launch.has_engine:
        argv += ["--spac-cache", launch.cache, "--spac-board", launch.board]
    argv += _address_arguments(options, launch)
    argv += _device_arguments(options, launch) + _load_arguments(options, launch)
    argv += _page_arguments(options, launch) + _http_arguments(options)
    return argv + list(options.passed)


def _name_arguments(options: ServeOptions) -> list[str]:
    """The file's name is what clients see of it; llama-server would tell its path."""
    if options.model is None or _is_given(options, "LLAMA_ARG_ALIAS", "-a", "--alias"):
        return []
    return ["--alias", _PART.sub("", options.model.stem).replace(",", "_")]


def _address_arguments(options: ServeOptions, launch: Launch) -> list[str]:
    if options.socket is not None:
        return ["--host", str(options.socket)]
    return ["--host", options.host, "--port", str(launch.port), "--metrics", *_name_arguments(options)]


def _draft_arguments(options: ServeOptions) -> list[str]:
    """llama.cpp's name of the drafter, and the longest draft, by the flags of its kind."""
    argv: list[str] = []
    own, n_max = in_server(options.wanted_spec_type), options.attach.n_draft_max
    if not options.passed_value("--spec-type") and (options.spec_type or options.draft or options.mtp):
        argv += ["--spec-type", own]
    if options.mtp is not None:
        # groups share the slots' cells; behind a window only cells of a single sequence are given back
        argv += ["--lora", str(options.mtp), "--kv-unified", "--swa-full"]
        for flag, value in mask_flags(n_max).items():
            argv += [flag, str(value)]
    elif n_max:
        for name in names_of(own):
            for flag, value in length_flags(name, n_max).items():
                argv += [flag, str(value)]
    return argv


def _device_arguments(options: ServeOptions, launch: Launch) -> list[str]:
    """An emulated device, or none, means that no other one is touched."""
    if (
        options.stock
        and not options.is_host_only
        and not _is_given(options, "LLAMA_ARG_N_CPU_MOE", "-ncmoe", "--n-cpu-moe")
    ):
        return ["--cpu-moe", *_named_devices(options, launch)]
    return _named_devices(options, launch)


def _named_devices(options: ServeOptions, launch: Launch) -> list[str]:
    match read_device_kind(options.device):
        case "auto" if launch.devices is None:
            return []
        case "emulated" | "none":
            return ["--device", "none"]
    servers = [] if options.rpc is None else ["--rpc", ",".join(split_endpoints(options.rpc))]
    names = [
        name for name in (launch.devices or options.device).split(",") if read_device_kind(name) == "named"
    ]
    return [*servers, "--device", ",".join(names)]


def given_threads(options: ServeOptions) -> str:
    """As -t or llama-server's variable says; "": neither is given."""
    return options.given_value("LLAMA_ARG_THREADS", *THREADS_FLAGS)


def n_threads(options: ServeOptions) -> int:
    """As -t says; else no more than cores that the process may use: they would wait for each other, awake."""
    if (text := given_threads(options)).isdecimal():
        return int(text)
    return default_n_threads(None if options.cpu_range is None else read_cpu_range(options.cpu_range))


def _core_arguments(options: ServeOptions) -> list[str]:
    if given_threads(options) or not (options.socket or options.cpu_range):
        return []
    return ["--threads", str(n_threads(options))]


def _load_arguments(options: ServeOptions, launch: Launch) -> list[str]:
    """Weights in memory of their own: pinned beside a real device, with huge pages without one."""
    is_given = _is_given(options, "LLAMA_ARG_LOAD_MODE", "-lm", "--load-mode")
    argv = ["--load-mode", "none"] if launch.is_copied and not is_given else []
    if launch.ram_bytes is None:
        return argv
    has_warmup = "--warmup" in options.passed or "--no-warmup" in options.passed
    return [
        *argv, "--lazy-mode", "experts",
        *([] if has_warmup else ["--no-warmup"]),  # it runs all experts: every page of the file
    ]  # fmt: skip


def _page_arguments(options: ServeOptions, launch: Launch) -> list[str]:
    """Where the build has no web page: one that says so, unless another one is given."""
    is_given = _is_given(options, "LLAMA_ARG_STATIC_PATH", *_PAGE_FLAGS)
    return [] if is_given or launch.has_page else ["--path", str(PAGE_FOLDER)]


def _http_arguments(options: ServeOptions) -> list[str]:
    """Pages of other web sites stay out, and an idle connection is closed."""
    argv: list[str] = []
    if not _is_given(options, "LLAMA_ARG_CORS_ORIGINS", "--cors-origins"):
        argv += ["--cors-origins", "", "--no-cors-credentials"]
    if not _is_given(options, "LLAMA_ARG_TIMEOUT", "-to", "--timeout"):
        argv += ["--timeout", str(TIMEOUT_S)]
    return argv


def _is_given(options: ServeOptions, variable: str, *flags: str) -> bool:
    return variable in os.environ or any(flag in options.passed for flag in flags)


def withheld(options: ServeOptions) -> dict[str, str | None]:
    """Variables that are not for a server of a command's own, as of `server_env`."""
    return dict.fromkeys(FOR_OTHERS) if options.socket is not None else {}


def server_env(options: ServeOptions, ram_bytes: int | None = None) -> dict[str, str | None]:
    """What llama-server and the engine read from the environment, beside flags; None: not what is there.

    `ram_bytes`: as of the launch.
    """
    own = withheld(options) | dict.fromkeys(READ_BY_FLAGS)
    if options.trace:
        return {**own, **_drafting_env(options), **options.trace}
    return own if options.stock else {**own, **_engine_env(options, ram_bytes)}


def _drafting_env(options: ServeOptions) -> dict[str, str]:
    max_batch = options.max_batch or min(options.default_max_batch, MAX_BATCH)
    env = {"PYSPAC_MAX_BATCH": str(max_batch)}
    if options.mtp is not None:
        env |= {"PYSPAC_MTP": str(options.mtp), "PYSPAC_MASKS": str(options.attach.n_draft_max)}
    return env


def _engine_env(options: ServeOptions, ram_bytes: int | None) -> dict[str, str]:
    env = _drafting_env(options)
    env["PYSPAC_DEVICE"] = options.device  # auto too: it leaves out those that have no MoE layer
    if options.wanted_spec_type == NGRAM:
        env["PYSPAC_NGRAM"] = str(options.attach.n_draft_max)
    if ram_bytes is not None:
        env[VARIABLE] = f"{ram_bytes}B"
    elif VARIABLE in os.environ:
        env[VARIABLE] = ""  # none, as all experts are loaded
    if "evict" in options.attach.scheduler.without:
        env["PYSPAC_EVICT"] = "0"
    if {"prefetch", "prompt"} & options.attach.scheduler.without:
        env["PYSPAC_FILL"] = "0"
    if {"prefetch", "prompt", "stage"} & options.attach.scheduler.without:
        env["PYSPAC_STAGE"] = "0"
    if options.host_kernels != "auto":
        env["PYSPAC_HOST_KERNELS"] = options.host_kernels
    if options.attach.scheduler.baseline is not None:
        env[BASELINE] = options.attach.scheduler.baseline
    if options.lossy is not None:
        env[LOSSY] = options.lossy
    if options.max_kl is not None:
        env[MAX_KL_VARIABLE] = repr(options.max_kl)
    if options.copy_gb_s:
        env["PYSPAC_COPY_GB_S"] = text_of(options.copy_gb_s)
    if options.cpu_range is not None:
        env["PYSPAC_CPU_RANGE"] = options.cpu_range
    can = can_predict(is_host_only=options.is_host_only, ram_bytes=ram_bytes)
    if can and (names := in_engine(options.attach.scheduler.predict)):
        env["PYSPAC_PREDICT"] = ",".join(names)
    if options.is_host_only:
        env["GLIBC_TUNABLES"] = os.environ.get("GLIBC_TUNABLES") or HUGE_PAGES
    return env


def attach_argv(board: str) -> list[str]:
    """The command line of the scheduler's process, which reads its settings from stdin."""
    return [sys.executable, "-m", "pyspac", "attach", board, "--settings", "-"]
