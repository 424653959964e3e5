"""How an engine attaches to a context: frozen, checked when made, with units in the names."""

from __future__ import annotations

from dataclasses import dataclass

from pyspac.checks import check_int, check_range
from pyspac.errors import ConfigError

HOST_MODES = ("auto", "in-graph", "executor", "in-stream")  # index = spac_host_mode
NEXT_LAYER_MAX = 3  # SPAC_NEXT_LAYER_MAX
STAGES = ("auto", "always", "never")  # index = spac_stage
HOST_KERNELS = ("auto", "spac", "ggml")  # index = spac_host_kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParams:
    """How an engine attaches to a context; mirrors spac_engine_params."""

    device: str = "auto"  # "auto" (the GPU, else none), "none" (no slots), "emulated", "CUDA0", "CUDA0,CUDA1"
    # "17%" of the experts of a device's layers, "4096" MiB, "auto" (free device memory), "0"; of each device,
    # or "4096,25%": one for each
    cache: str = "auto"
    board_name: str | None = None  # None: private memory; else POSIX shared memory /NAME
    host_mode: str = "auto"  # one of HOST_MODES
    n_threads: int = 0  # of the host executor; 0: as the context's
    max_batch: int = 16  # more tokens than this take stock's path; at least the draft length + 1
    copy_gb_s: float = 0.0  # throttle of copies, to emulate a slower link; 0: none
    device_copy_gb_s: tuple[float, ...] = ()  # the same, of each of several devices; 0: copy_gb_s
    evict: bool = True  # False: a resident expert never leaves
    verbose: bool = False
    host_kernels: str = "auto"  # one of HOST_KERNELS: whose kernels compute the host's experts
    fill: bool = True  # experts that were just used take free slots at once, those of prompts included
    stage: str = "auto"  # one of STAGES: whether the experts of wide batches pass through the slots
    next_layer: int = 0  # 1 .. 3: routers of so many MoE layers further on are asked early; 0: not
    lossy: str | None = None  # "drop:2", "lowbit:2:FILE": what need not be exact (--lossy); None: all is
    baseline: str | None = None  # "lru+fetch": who leaves, and what becomes of misses; None: by decisions
    ram_bytes: int = 0  # memory for experts that lie in mapped files; 0: all are loaded
    cpu_range: str | None = None  # "0-7": the host's own threads, each on one of these cores; None: anywhere

    def __post_init__(self) -> None:
        """Check every field; the engine checks device, cache, board_name, cpu_range, and what is too much."""
        if self.host_mode not in HOST_MODES:
            raise ConfigError("host_mode", self.host_mode, f"one of {', '.join(HOST_MODES)}")
        if self.host_kernels not in HOST_KERNELS:
            raise ConfigError("host_kernels", self.host_kernels, f"one of {', '.join(HOST_KERNELS)}")
        if self.stage not in STAGES:
            raise ConfigError("stage", self.stage, f"one of {', '.join(STAGES)}")
        check_int("n_threads", self.n_threads, 0)
        check_int("max_batch", self.max_batch, 1)
        check_int("ram_bytes", self.ram_bytes, 0)
        check_int("next_layer", self.next_layer, 0, NEXT_LAYER_MAX)
        for speed in (self.copy_gb_s, *self.device_copy_gb_s):
            check_range("copy_gb_s", speed, 0.0, 1e5)
