"""The board: the arrays through which the engine and the scheduler talk, as numpy views without copies.

`Board` wraps the board of a running engine (spac_board_view in spac.h); `LocalBoard` has the same arrays in
plain memory, for tests, the lab and benchmarks: no native library needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyspac.engine.step import RECORD_DTYPE, StepRecord
from pyspac.errors import ConfigError, EngineError

N_RECORDS = 256  # SPAC_N_RECORDS
N_ROUTED = 512  # SPAC_N_ROUTED
N_UPCOMING = 512  # SPAC_N_UPCOMING
N_SERVER_SLOTS = 64  # SPAC_N_SERVER_SLOTS
AHEAD_NAMES = ("next-layer", "draft-gate")  # index = spac_ahead_source
NO_BUDGET = 2**64 - 1  # byte_budget: no limit
FALLBACKS = (
    "",
    "copies",
    "frozen",
    "whole",
    "split",
)  # whether copies pay, as measured; "": not compared yet


class Residency(IntEnum):
    """Where an expert's weights are on the device (spac_residency)."""

    ABSENT = 0
    QUEUED = 1
    LOADING = 2
    RESIDENT = 3


class LayerMode(IntEnum):
    """Who computes a layer (spac_layer_mode)."""

    SPLIT = 0
    FILLING = 1  # split, but all of its experts are on their way to slots that are reserved for them
    WHOLE = 2  # in the last forward the device, which has all of its experts; nothing of it is counted


# of the counters: what a prompt's experts did that passed through the slots
STAGE_FIELDS = ("n_staged", "staged_bytes", "staged_us", "stage_wait_us")
# the fields of the C structs, in their order
COUNTER_FIELDS = (
    "n_forward", "n_forward_both", "n_hit", "n_miss", "n_late", "n_hit_rows", "n_miss_rows", "n_late_rows",
    "n_loads", "n_load_failures", "n_evictions", "loaded_bytes", "load_us", "dispatch_us", "wait_us",
    "n_decisions", "n_pinned_steals", "n_prompt_tokens",
    *STAGE_FIELDS,
)  # fmt: skip
AHEAD_FIELDS = (
    "n_inputs", "n_late", "us", "n_predicted", "n_chosen", "n_hit", "n_queued", "n_cut", "n_dropped",
    "n_copied", "n_used", "n_wasted", "cutoff_layer",
)  # fmt: skip
LAYER_STATS_FIELDS = (
    "n_calls", "n_device_experts", "n_host_experts", "n_device_rows", "n_host_rows",
    "device_us", "host_us", "layer_us",
)  # fmt: skip
DEVICE_FIELDS = (
    "name", "copy_gb_s", "is_emulated", "n_slots", "pool_bytes", "expert_bytes", "n_loads",
    "n_load_failures", "loaded_bytes", "load_us", "wait_us",
)  # fmt: skip
_DEVICE_TYPES = {"name": "S64", "copy_gb_s": np.float64}
# spac_tier_info; `size` and `error` are the C caller's
_TIER_TYPES = {"n_slots": np.int32, "n_resident": np.int32, "is_direct": np.bool_, "error": "S256"}
TIER_FIELDS = (
    "size", "pool_bytes", "n_slots", "n_resident", "n_hit", "n_miss", "n_ahead", "n_reads", "read_bytes",
    "read_us", "busy_us", "wait_us", "is_direct", "error", "n_to_device", "n_to_device_read",
)  # fmt: skip
COUNTERS_DTYPE = np.dtype([(name, np.uint64) for name in COUNTER_FIELDS])
AHEAD_DTYPE = np.dtype([(name, np.uint64) for name in AHEAD_FIELDS])
DEVICE_DTYPE = np.dtype([(name, _DEVICE_TYPES.get(name, np.uint64)) for name in DEVICE_FIELDS])
TIER_DTYPE = np.dtype([(name, _TIER_TYPES.get(name, np.uint64)) for name in TIER_FIELDS], align=True)
LAYER_STATS_DTYPE = np.dtype([(name, np.uint64) for name in LAYER_STATS_FIELDS])


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardGeometry:
    """Sizes that a board is made for. The last three are per layer, [n_layer]."""

    n_layer: int
    n_expert: int
    n_expert_used: int
    expert_bytes: Sequence[int]  # of one expert; 0: the layer is not split
    group: Sequence[int]  # layout group: slots are shared within a group only
    group_slots: Sequence[int]  # slots of that layer's group
    max_batch: int = 16
    layer_device: Sequence[int] = ()  # which device has the layer's slots; (): there is one

    def __post_init__(self) -> None:
        """Check sizes; ConfigError names the field."""
        sizes = {"n_layer": self.n_layer, "n_expert": self.n_expert, "n_expert_used": self.n_expert_used,
                 "max_batch": self.max_batch}  # fmt: skip
        for field, size in sizes.items():
            if size < 1:
                raise ConfigError(field, size, "1 or more")
        columns = {"expert_bytes": self.expert_bytes, "group": self.group, "group_slots": self.group_slots}
        for field, column in columns.items():
            if len(column) != self.n_layer:
                raise ConfigError(field, len(column), f"one entry per layer, {self.n_layer}")

    @classmethod
    def uniform(
        cls, *, n_layer: int, n_expert: int, n_expert_used: int, n_slots: int, expert_bytes: int = 1 << 20
    ) -> BoardGeometry:
        """Return the geometry of equal layers in one layout group that share n_slots."""
        return cls(
            n_layer=n_layer, n_expert=n_expert, n_expert_used=n_expert_used,
            expert_bytes=[expert_bytes] * n_layer, group=[0] * n_layer, group_slots=[n_slots] * n_layer,
        )  # fmt: skip


class About:  # STUB
    pass


class BoardView:
    """The arrays of a board. Names, order and meaning as in spac_board_view; the engine's are read-only."""

    n_layer: int
    n_expert: int
    n_expert_used: int
    n_slots: int
    max_batch: int
    n_load_max: int
    n_device: int
    # written by the engine
    counts: NDArray[np.uint32]  # [n_layer, n_expert] cumulative activations, wraps
    prompt_counts: NDArray[np.uint32]  # [n_layer, n_expert] the same, of batches wider than max_batch
    residency: NDArray[np.uint8]  # [n_layer, n_expert] Residency
    expert_bytes: NDArray[np.uint32]  # [n_layer] of one expert; 0: the layer is not split
    group: NDArray[np.uint32]  # [n_layer]
    group_slots: NDArray[np.uint32]  # [n_layer]
    layer_device: NDArray[np.uint32]  # [n_layer] index of the device with the layer's experts
    devices: NDArray[Any]  # [n_device] DEVICE_DTYPE
    layer_stats: NDArray[Any]  # [n_layer] LAYER_STATS_DTYPE, cumulative
    counters: NDArray[Any]  # [1] COUNTERS_DTYPE, cumulative
    ahead: NDArray[Any]  # [2] AHEAD_DTYPE by AHEAD_NAMES, cumulative but for cutoff_layer
    records: NDArray[Any]  # [N_RECORDS] RECORD_DTYPE, a ring
    n_records: NDArray[np.uint64]  # [1] records ever written
    routed_tokens: NDArray[np.int32]  # [N_ROUTED] a ring of routed tokens: id of the vocabulary, or -1
    routed_experts: NDArray[np.uint16]  # [N_ROUTED, n_layer, n_expert_used] what they used; 65535: nothing
    n_routed: NDArray[np.uint64]  # [2] rows ever written; rows ever begun, which overwrite others
    upcoming: NDArray[np.int32]  # [N_UPCOMING] tokens that a server's next batch computes
    n_upcoming: NDArray[np.uint32]  # [1] of these
    n_looks: NDArray[np.uint64]  # [1] rises by two with each look ahead; odd while one is being written
    tier: NDArray[Any]  # [1] TIER_DTYPE as of the last forward: experts on disk; zeros without
    in_memory: NDArray[np.uint8]  # [n_layer, n_expert] as of then: 1: that tier has it; zeros without
    whole: NDArray[np.uint8]  # [n_layer] LayerMode
    # written by the scheduler, inside `with board.decision():`
    utility: NDArray[np.uint8]  # [n_layer, n_expert] expected demand
    tau: NDArray[np.uint8]  # [n_layer]
    load: NDArray[np.uint32]  # [n_load_max] il * n_expert + ie, most wanted first
    n_load: NDArray[np.uint32]  # [1]
    byte_budget: NDArray[np.uint64]  # [n_device] bytes per forward; NO_BUDGET: no limit
    want_whole: NDArray[np.uint8]  # [n_layer] 1: the device shall have all of its experts
    # written by the scheduler at any time: aligned integers, each of them a decision of its own
    n_draft_max: NDArray[np.int32]  # [N_SERVER_SLOTS] -1: none
    looks_ahead: NDArray[np.uint32]  # [1] not 0: a server tells of upcoming tokens
    fallback: NDArray[np.int32]  # [2] index into FALLBACKS, thousandths of tokens/s by which that is faster

    def _layout(self) -> dict[str, tuple[Any, tuple[int, ...]]]:
        """Return dtype and shape of every array."""
        n_layer = self.n_layer
        per_expert = (n_layer, self.n_expert)
        return {
            "counts": (np.uint32, per_expert),
            "prompt_counts": (np.uint32, per_expert),
            "residency": (np.uint8, per_expert),
            "expert_bytes": (np.uint32, (n_layer,)),
            "group": (np.uint32, (n_layer,)),
            "group_slots": (np.uint32, (n_layer,)),
            "layer_device": (np.uint32, (n_layer,)),
            "devices": (DEVICE_DTYPE, (self.n_device,)),
            "layer_stats": (LAYER_STATS_DTYPE, (n_layer,)),
            "counters": (COUNTERS_DTYPE, (1,)),
            "ahead": (AHEAD_DTYPE, (len(AHEAD_NAMES),)),
            "tier": (TIER_DTYPE, (1,)),
            "in_memory": (np.uint8, per_expert),
            "whole": (np.uint8, (n_layer,)),
            "records": (RECORD_DTYPE, (N_RECORDS,)),
            "n_records": (np.uint64, (1,)),
            "routed_tokens": (np.int32, (N_ROUTED,)),
            "routed_experts": (np.uint16, (N_ROUTED, n_layer, self.n_expert_used)),
            "n_routed": (np.uint64, (2,)),
            "upcoming": (np.int32, (N_UPCOMING,)),
            "n_upcoming": (np.uint32, (1,)),
            "n_looks": (np.uint64, (1,)),
            "utility": (np.uint8, per_expert),
            "tau": (np.uint8, (n_layer,)),
            "load": (np.uint32, (self.n_load_max,)),
            "n_load": (np.uint32, (1,)),
            "byte_budget": (np.uint64, (self.n_device,)),
            "want_whole": (np.uint8, (n_layer,)),
            "n_draft_max": (np.int32, (N_SERVER_SLOTS,)),
            "looks_ahead": (np.uint32, (1,)),
            "fallback": (np.int32, (2,)),
        }

    about: Any = None  # STUB

    def declined_reasons(self) -> dict[int, str]:  # STUB
        return {}

    def read_fallback(self) -> dict[str, Any] | None:
        """Return what the scheduler found about copies: `chosen` and `gain`; None: nothing yet."""
        way, thousandths = self.fallback.tolist()
        return {"chosen": FALLBACKS[way], "gain": thousandths / 1e3} if 0 < way < len(FALLBACKS) else None

    def read_upcoming(self) -> list[int] | None:
        """Return what the next batch computes; None while that is being written, or if nobody told it."""
        n_looks = int(self.n_looks[0])
        tokens = self.upcoming[: min(int(self.n_upcoming[0]), N_UPCOMING)].tolist()
        is_whole = n_looks > 0 and n_looks % 2 == 0 and n_looks == int(self.n_looks[0])
        return tokens if is_whole else None

    def _begin(self) -> None:
        """Mark the decision as being written."""

    def _end(self) -> None:
        """Publish the decision."""

    @contextmanager
    def decision(self) -> Iterator[None]:
        """Hold the sequence lock while utility, tau, loads and budget are written; draft limits need none."""
        self._begin()
        try:
            yield
        finally:
            self._end()


ENGINE_ARRAYS = ("counts", "prompt_counts", "residency", "expert_bytes", "group", "group_slots",
                 "layer_device", "devices",
                 "layer_stats", "counters", "ahead", "tier", "in_memory", "whole", "records", "n_records",
                 "routed_tokens", "routed_experts", "n_routed",
                 "upcoming", "n_upcoming", "n_looks")  # fmt: skip
SCHEDULER_ARRAYS = ("utility", "tau", "load", "n_load", "byte_budget", "want_whole", "n_draft_max",
                    "looks_ahead", "fallback")  # fmt: skip


class LocalBoard(BoardView):
    """A board in plain memory. No engine runs behind it: a test writes what one would."""

    def __init__(self, geometry: BoardGeometry) -> None:
        """Allocate all arrays, zero except for the geometry; no budget, no draft limits."""
        self.n_layer = geometry.n_layer
        self.n_expert = geometry.n_expert
        self.n_expert_used = geometry.n_expert_used
        self.max_batch = geometry.max_batch
        self.n_load_max = geometry.n_layer * geometry.n_expert
        self.n_device = 1 + max(geometry.layer_device, default=0)
        for name, (dtype, shape) in self._layout().items():
            setattr(self, name, np.zeros(shape, dtype))
        self.expert_bytes[:] = geometry.expert_bytes
        self.group[:] = geometry.group
        self.group_slots[:] = geometry.group_slots
        self.layer_device[:] = geometry.layer_device or 0
        self.n_slots = sum(dict(zip(geometry.group, geometry.group_slots, strict=True)).values())
        self.byte_budget[:] = NO_BUDGET
        self.n_draft_max[:] = -1
        self.n_decisions = 0

    def _end(self) -> None:
        self.n_decisions += 1

    def record_step(self, record: StepRecord) -> None:
        """Append a step record, as spac_engine_record_step does."""
        self.records[int(self.n_records[0]) % N_RECORDS] = record.to_row()
        self.n_records[0] += np.uint64(1)

    def record_routing(self, tokens: NDArray[np.int32], experts: NDArray[np.uint16]) -> None:
        """Append rows to the routing log, as a forward of these tokens does: [n], and as `routed_experts`."""
        row = (int(self.n_routed[0]) + np.arange(len(tokens))) % N_ROUTED
        self.routed_tokens[row] = tokens
        self.routed_experts[row] = experts
        self.n_routed += np.uint64(len(tokens))


class Board(BoardView):
    """The board of a running engine, in this process or in POSIX shared memory.

    The arrays point into the board's memory: after `close()` they are gone, and reading them raises
    EngineError. Keep the board, not its arrays.
    """

    def __init__(self, handle: Any, *, owner: object = None) -> None:
        """Wrap a spac_board handle. `owner` (an engine) is kept alive as long as the board."""
        from pyspac._native import check, ffi, lib  # here: LocalBoard must work without the native library

        self._ffi, self._lib = ffi, lib
        self._handle = handle
        self._owner = owner
        self._is_closed = False
        view = ffi.new("spac_board_view *")
        view.size = ffi.sizeof("spac_board_view")
        check(lib.spac_board_get_view(handle, view))
        self.n_layer, self.n_expert, self.n_expert_used = view.n_layer, view.n_expert, view.n_expert_used
        self.n_slots, self.max_batch, self.n_load_max = view.n_slots, view.max_batch, view.n_load_max
        self.n_device = view.n_device
        for name, (dtype, shape) in self._layout().items():
            setattr(self, name, self._array(getattr(view, name), np.dtype(dtype), shape))
        for name in ENGINE_ARRAYS:
            getattr(self, name).flags.writeable = False

    def _array(self, pointer: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        n_bytes = int(np.prod(shape)) * dtype.itemsize
        # an array keeps handle and owner alive, also when the board object itself is gone
        kept = (self._handle, self._owner)
        pointer = self._ffi.gc(pointer, lambda _pointer, _kept=kept: None)
        return np.frombuffer(self._ffi.buffer(pointer, n_bytes), dtype).reshape(shape)

    @classmethod
    def open(cls, name: str) -> Board:
        """Open the board /NAME of a running engine; EngineError if there is none."""
        from pyspac._native import check, ffi, lib

        out = ffi.new("spac_board **")
        check(lib.spac_board_open(name.encode(), out))
        return cls(ffi.gc(out[0], lib.spac_board_close))

    def _begin(self) -> None:
        self._lib.spac_decision_begin(self._live_handle())

    def _end(self) -> None:
        self._lib.spac_decision_end(self._live_handle())

    def _live_handle(self) -> Any:
        if self._is_closed:
            raise EngineError(5, "the board is closed: its engine was freed or close() was called")
        return self._handle

    def close(self) -> None:
        """Drop the arrays, and the mapping if this board was opened by name. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        for name in (*ENGINE_ARRAYS, *SCHEDULER_ARRAYS):
            delattr(self, name)
        if self._owner is None:
            self._ffi.release(self._handle)
        self._owner = None

    def __getattr__(self, name: str) -> Any:
        """Explain a missing array of a closed board."""
        if name in ENGINE_ARRAYS or name in SCHEDULER_ARRAYS:
            raise EngineError(5, f"the board is closed: {name} is gone; open it again or attach a new engine")
        raise AttributeError(name)

    def __enter__(self) -> Board:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
