"""Steps 5 to 7 live in libspac: this is its handle in Python, and what else the C ABI offers.

In: a llama_context and EngineParams. Out: an Engine whose `board` the scheduler reads and writes. Each
function here is one function of engine/include/spac.h, whose comments say more; every failure is an
EngineError.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from pyspac._native import check, ffi, lib
from pyspac.engine.board_figures import EngineInfo, read_declined, read_info
from pyspac.engine.limits import check_max_batch, check_n_threads
from pyspac.engine.params import HOST_KERNELS, HOST_MODES, STAGES, EngineParams
from pyspac.engine.step import StepRecord
from pyspac.engine.tensor_types import TYPE_IDS
from pyspac.engine.values import check_value
from pyspac.errors import EngineError, UsageError

if TYPE_CHECKING:
    from pyspac.engine.board import Board

__all__ = [
    "DeviceInfo",
    "Engine",
    "EngineInfo",
    "EngineParams",
    "Span",
    "TierInfo",
    "add_rpc",
    "cpu_buffer_type",
    "device_count",
    "devices",
    "find_devices",
    "has_kernels",
    "host_buffer_type",
    "kernels_name",
    "load_backends",
    "measure_attention_gop_s",
    "measure_host_gb_s",
    "measure_kernel_gb_s",
    "measure_link_gb_s",
    "tokens_per_expert",
]


SPAN_KINDS = ("dispatch", "device", "host", "collect", "copy")  # index = spac_span_kind
N_SPANS_MAX = 1 << 16  # as many as the engine keeps


@dataclass(frozen=True, slots=True)
class TierInfo:
    """spac_tier_info: the memory that holds some of the experts, of a model whose experts lie on disk."""

    pool_bytes: int
    n_slots: int
    n_resident: int  # slots with an expert in them
    n_hit: int  # distinct (layer, expert) asked for, in memory or on their way; cumulative, as all below
    n_miss: int  # not: read while the layer waits
    n_ahead: int  # read before they were asked for
    n_reads: int  # of one matrix each
    read_bytes: int
    read_us: int  # of all reads, added up
    busy_us: int  # at least one read was under way
    wait_us: int  # a layer waited for a read
    is_direct: bool  # around the page cache
    error: str  # why the last forward failed: an expert could not be read; "": it did not
    n_to_device: int  # experts copied to the device beside it
    n_to_device_read: int  # of these: straight from disk


@dataclass(frozen=True, slots=True)
class Span:
    """Who was at work, and when; mirrors spac_span. Times in microseconds of time.monotonic()."""

    kind: str  # one of SPAN_KINDS
    il: int
    begin_us: int
    end_us: int


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One ggml device; mirrors spac_device_info."""

    name: str
    description: str
    type: int  # enum ggml_backend_dev_type
    memory_free: int  # bytes
    memory_total: int
    handle: int  # ggml_backend_dev_t, for llama_model_params.devices
    has_pinned: bool  # host memory from which copies are fast


def _text(value: Any) -> str:
    return str(ffi.string(value).decode(errors="replace"))


class Engine:
    """An engine attached to a context. Close it before the context; a context manager does."""

    def __init__(self, handle: Any) -> None:
        """Wrap a spac_engine handle that frees itself (ffi.gc); use `attach`."""
        self._handle = handle
        self._is_closed = False
        from pyspac.engine.board import Board  # loaded here: numpy takes longer than the rest

        self.board: Board = Board(lib.spac_engine_board(handle), owner=handle)

    @classmethod
    def attach(cls, ctx_ptr: int, params: EngineParams | None = None) -> Self:
        """Attach to the llama_context at ctx_ptr; EngineError says why it failed and what to do."""
        c_params, _texts = _c_params(params or EngineParams())  # _texts must outlive the call
        out = ffi.new("spac_engine **")
        check(lib.spac_engine_attach(ffi.cast("struct llama_context *", ctx_ptr), c_params, out))
        return cls(ffi.gc(out[0], lib.spac_engine_free))

    def _live(self) -> Any:
        if self._is_closed:
            raise EngineError(lib.SPAC_STATUS_INVALID_ARGUMENT, "the engine is closed; attach a new one")
        return self._handle

    def info(self) -> EngineInfo:
        """Return device, sizes and how many layers are split."""
        return read_info(self.board)

    def tier(self) -> TierInfo:
        """Return the figures of the memory tier; all zeros without one."""
        info = ffi.new("spac_tier_info *")
        check(lib.spac_engine_get_tier(self._live(), info))
        fields = {name: getattr(info, name) for name in TierInfo.__slots__}
        return TierInfo(**{**fields, "error": _text(info.error)})

    def watch_draft(self, ctx_ptr: int) -> None:
        """Predict experts with the routers of this engine's model on the inputs of a draft model's.

        ctx_ptr: the draft's llama_context. EngineError names what does not fit: a dense draft model, another
        number of MoE layers, another width.
        """
        check(lib.spac_engine_watch_draft(self._live(), ffi.cast("struct llama_context *", ctx_ptr)))

    def declined(self) -> dict[int, str]:
        """Return the layers the engine leaves to stock, and why."""
        return read_declined(self.board)

    def slot(self, il: int, ie: int) -> int | None:
        """Return the device slot of an expert, or None if it is not resident."""
        out = ffi.new("int32_t *")
        check(lib.spac_engine_slot(self._live(), il, ie, out))
        return int(out[0]) if out[0] >= 0 else None

    def apply(self) -> None:
        """Take over the board's decision now; else the next forward does."""
        check(lib.spac_engine_apply(self._live()))

    def wait_idle(self, timeout_ms: int = 10_000) -> None:
        """Wait until no load is queued or in flight; EngineError (SPAC_STATUS_TIMEOUT) after timeout_ms."""
        check(lib.spac_engine_wait_idle(self._live(), timeout_ms))

    def end_forward(self) -> None:
        """Say that no forward is running: pins are released, the byte budget is renewed."""
        check(lib.spac_engine_end_forward(self._live()))

    def count_first(self, n_tokens: int) -> None:
        """In the forwards that follow, learn only from the first tokens; 0: from all."""
        check(lib.spac_engine_count_first(self._live(), n_tokens))

    def record_step(self, record: StepRecord) -> None:
        """Append a step record to the board."""
        self.board.record_step(record)

    def take_spans(self) -> list[Span]:
        """Return the executor's spans since the last call, by their ends; the first call starts recording."""
        spans, n = ffi.new("spac_span[]", N_SPANS_MAX), ffi.new("int32_t *")
        check(lib.spac_engine_take_spans(self._live(), spans, N_SPANS_MAX, n))
        return [
            Span(SPAN_KINDS[s.kind], int(s.il), int(s.t_begin_us), int(s.t_end_us)) for s in spans[0 : n[0]]
        ]

    def close(self) -> None:
        """Stop the worker, remove the hook, free the pools. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self.board.close()
        ffi.release(self._handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def _c_params(params: EngineParams) -> tuple[Any, list[Any]]:
    """Return a spac_engine_params and the strings it points to. ConfigError for what is beyond a limit."""
    check_n_threads("n_threads", params.n_threads, 0)  # 0: as many as the context
    check_max_batch("max_batch", params.max_batch)
    c_params = ffi.new("spac_engine_params *", lib.spac_engine_default_params())
    texts: list[Any] = []

    def c_text(text: str | None) -> Any:
        if text is None:
            return ffi.NULL
        texts.append(ffi.new("char[]", text.encode()))
        return texts[-1]

    c_params.device, c_params.cache = c_text(params.device), c_text(params.cache)
    c_params.ram_bytes = params.ram_bytes
    c_params.lossy, c_params.baseline = c_text(params.lossy), c_text(params.baseline)
    c_params.board_name, c_params.cpu_range = c_text(params.board_name), c_text(params.cpu_range)
    c_params.n_threads, c_params.max_batch = params.n_threads, params.max_batch
    c_params.copy_gb_s = params.copy_gb_s
    c_params.device_copy_gb_s = params.device_copy_gb_s
    c_params.evict, c_params.fill, c_params.verbose = params.evict, params.fill, params.verbose
    c_params.next_layer = params.next_layer
    c_params.stage = STAGES.index(params.stage)
    c_params.host_mode = HOST_MODES.index(params.host_mode)
    c_params.host_kernels = HOST_KERNELS.index(params.host_kernels)
    return c_params, texts


def load_backends() -> None:
    """Register the ggml backends built beside libspac; the functions below do it by themselves."""
    check(lib.spac_backend_load_all())


def devices() -> list[DeviceInfo]:
    """Return all ggml devices, the CPU included."""
    load_backends()
    found = []
    for index in range(lib.spac_device_count()):
        info = ffi.new("spac_device_info *")
        check(lib.spac_device_get_info(index, info))
        found.append(
            DeviceInfo(
                name=_text(info.name),
                description=_text(info.description),
                type=int(info.type),
                memory_free=int(info.memory_free),
                memory_total=int(info.memory_total),
                handle=int(ffi.cast("uintptr_t", info.handle)),
                has_pinned=bool(info.has_pinned),
            )
        )
    return found


def device_count() -> int:
    """Return how many devices ggml has, the CPU included."""
    load_backends()
    return int(lib.spac_device_count())


def find_devices(names: str) -> list[int]:
    """Return the indices of the devices that `names` ("CUDA0,CUDA1") mean, by the engine's own rule.

    "auto" is all GPUs of the machine, each once, integrated ones where there is no other; none where there is
    none. Raises UsageError if a device is not there or named twice.
    """
    load_backends()
    indices, n = ffi.new("int32_t[]", lib.SPAC_N_DEVICES), ffi.new("int32_t *")
    if lib.spac_devices_find(os.fsencode(names), indices, n) != lib.SPAC_STATUS_SUCCESS:
        raise UsageError(ffi.string(lib.spac_last_error()).decode(errors="replace"))
    return [int(index) for index in indices[0 : n[0]]]


def has_kernels(type_name: str) -> bool:
    """Return whether the engine's own kernels multiply weights of this type ("Q4_K") on this machine.

    Raises UsageError where PYSPAC_KERNELS names none of this machine's.
    """
    found = ffi.new("bool *")
    check_value(lib.spac_has_kernels(TYPE_IDS.get(type_name, -1), found))
    return bool(found[0])


def kernels_name() -> str:
    """Return which of the engine's own kernels this machine runs ("avx512"); "": none.

    Raises UsageError where PYSPAC_KERNELS names none of this machine's.
    """
    name = ffi.new("const char **")
    check_value(lib.spac_kernels_name(name))
    return str(ffi.string(name[0]).decode())


def tokens_per_expert() -> int:
    """Return how many tokens of a prompt per expert the engine's own kernels want at once; 0: few suffice.

    Raises UsageError where PYSPAC_KERNELS names none of this machine's.
    """
    n = ffi.new("int32_t *")
    check_value(lib.spac_tokens_per_expert(n))
    return int(n[0])


def add_rpc(endpoint: str) -> None:
    """Add the devices of an RPC server, HOST:PORT."""
    load_backends()
    check(lib.spac_device_add_rpc(endpoint.encode()))


def cpu_buffer_type() -> int:
    """Return the ggml_backend_buffer_type_t of the host, for llama_model_params.tensor_buft_overrides."""
    load_backends()
    return int(ffi.cast("uintptr_t", lib.spac_cpu_buffer_type()))


def host_buffer_type() -> int:
    """Return one of the host with huge pages, never repacked: for the engine's own kernels."""
    return int(ffi.cast("uintptr_t", lib.spac_host_buffer_type()))


def measure_host_gb_s(n_threads: int) -> float:
    """Return how fast n_threads read host memory, in 1e9 bytes/s. Takes about a second."""
    out = ffi.new("double *")
    check(lib.spac_measure_host_gb_s(n_threads, out))
    return float(out[0])


def measure_kernel_gb_s(type_name: str, n_tokens: int, n_threads: int) -> float:
    """Return how fast weights of a type are read and multiplied by so many tokens, in 1e9 bytes/s.

    By the engine's own kernels, on n_threads, 1 to 512 tokens; it takes a second at most. Raises EngineError
    where they lack the type.
    """
    out = ffi.new("double *")
    check(lib.spac_measure_kernel_gb_s(TYPE_IDS[type_name], n_tokens, n_threads, out))
    return float(out[0])


def measure_attention_gop_s(n_tokens: int, n_threads: int) -> float:
    """Return how fast so many tokens (1 to 512) attend to 512, in 1e9 operations/s, without a device."""
    out = ffi.new("double *")
    check(lib.spac_measure_attention_gop_s(n_tokens, n_threads, out))
    return float(out[0])


def measure_link_gb_s(device: str) -> float:
    """Return how fast copies reach the device, in 1e9 bytes/s. Takes about a second."""
    load_backends()
    out = ffi.new("double *")
    check(lib.spac_measure_link_gb_s(device.encode(), out))
    return float(out[0])
