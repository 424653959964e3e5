"""The board: the arrays through which the engine and the scheduler talk, as numpy views without copies.

SPAC_BOARD_FIELDS in spac.h lists them; here they come from libspac, under the same names. `Board` is that
of a running engine; `LocalBoard` has no engine behind it, for tests, the lab and benchmarks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from pyspac.engine.step import StepRecord
from pyspac.errors import ConfigError, EngineError

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


class Field(NamedTuple):
    """One array of the board, as spac.h lists it."""

    name: str
    type: str  # of an element
    shape: str  # "(n_layer, n_expert)"
    writer: int  # spac_board_writer
    meaning: str
    array: NDArray[Any]


class Board:
    """The board of a running engine, in this process or in POSIX shared memory.

    Its arrays are attributes: docs/c-abi.md#the-boards-arrays. The engine's are read-only. They point into
    the board's memory: after `close()` they are gone, and reading them raises EngineError. Keep the board,
    not its arrays.
    """

    n_layer: int
    n_expert: int
    n_expert_used: int
    n_slots: int
    max_batch: int
    n_device: int

    def __init__(self, handle: Any, *, owner: object = None) -> None:
        """Wrap a spac_board handle. `owner` (an engine) is kept alive as long as the board."""
        from pyspac._native import ffi, lib  # loaded here: the command line comes up without it

        self._ffi, self._lib = ffi, lib
        self._handle = handle
        self._owner = owner
        self._is_closed = False
        geometry = lib.spac_board_get_view(handle).geometry
        for name, _field in ffi.typeof("spac_board_geometry").fields:
            setattr(self, name, getattr(geometry, name))
        fields = self.fields()
        self._names = frozenset(field.name for field in fields)
        for field in fields:
            field.array.flags.writeable = self._may_write(field.writer)
            setattr(self, field.name, field.array)

    @classmethod
    def open(cls, name: str) -> Board:
        """Open the board /NAME of a running engine; EngineError if there is none."""
        from pyspac._native import check, ffi, lib

        out = ffi.new("spac_board **")
        check(lib.spac_board_open(name.encode(), out))
        return cls(ffi.gc(out[0], lib.spac_board_close))

    def fields(self) -> list[Field]:
        """Return all arrays, in the order of the list."""
        c_field = self._ffi.new("spac_board_field *")
        found: list[Field] = []
        while self._lib.spac_board_get_field(self._live_handle(), len(found), c_field):
            texts = (c_field.name, c_field.type, c_field.shape, c_field.meaning)
            name, c_type, shape, meaning = (self._ffi.string(text).decode() for text in texts)
            array = self._array(c_field, _dtype(self._ffi, self._ffi.typeof(c_type)))
            found.append(Field(name, c_type, shape, c_field.writer, meaning, array))
        return found

    def _array(self, c_field: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
        # an array keeps handle and owner alive, also when the board object itself is gone
        kept = (self._handle, self._owner)
        pointer = self._ffi.gc(c_field.data, lambda _pointer, _kept=kept: None)
        values = np.frombuffer(self._ffi.buffer(pointer, c_field.n_bytes), dtype)
        return values.reshape(list(c_field.dims)[: c_field.n_dims])

    def _may_write(self, writer: int) -> bool:
        return writer in (self._lib.SPAC_WRITER_DECISION, self._lib.SPAC_WRITER_SCHEDULER)

    def read_fallback(self) -> dict[str, Any] | None:
        """Return what the scheduler found about copies: `chosen` and `gain`; None: nothing yet."""
        way, thousandths = self.fallback.tolist()
        return {"chosen": FALLBACKS[way], "gain": thousandths / 1e3} if 0 < way < len(FALLBACKS) else None

    def read_upcoming(self) -> list[int] | None:
        """Return what the next batch computes; None while that is being written, or if it is unknown."""
        n_looks = int(self.n_looks[0])
        tokens: list[int] = self.upcoming[: int(self.n_upcoming[0])].tolist()
        is_whole = n_looks > 0 and n_looks % 2 == 0 and n_looks == int(self.n_looks[0])
        return tokens if is_whole else None

    @contextmanager
    def decision(self) -> Iterator[None]:
        """Hold the sequence lock while utility, tau, loads and budget are written; draft limits need none."""
        self._lib.spac_decision_begin(self._live_handle())
        try:
            yield
        finally:
            self._lib.spac_decision_end(self._live_handle())

    def record_step(self, record: StepRecord) -> None:
        """Append a step record to the ring."""
        from pyspac._native import check

        row = {name: int(getattr(record, name)) for name in self.records.dtype.names or ()}
        check(self._lib.spac_board_record_step(self._live_handle(), self._ffi.new("spac_step_record *", row)))

    def _live_handle(self) -> Any:
        if self._is_closed:
            raise EngineError(5, "the board is closed: its engine was freed or close() was called")
        return self._handle

    def close(self) -> None:
        """Drop the arrays, and the mapping if this board was opened by name. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        for name in self._names:
            delattr(self, name)
        if self._owner is None:
            self._ffi.release(self._handle)
        self._owner = None

    def __getattr__(self, name: str) -> NDArray[Any]:
        """Explain a missing array of a closed board. mypy takes any name for an array's."""
        if name in self.__dict__.get("_names", ()):
            raise EngineError(5, f"the board is closed: {name} is gone; open it again or attach a new engine")
        raise AttributeError(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class LocalBoard(Board):
    """A board in plain memory. No engine runs behind it: a test writes what one would."""

    def __init__(self, geometry: BoardGeometry) -> None:
        """Make all arrays, zero except for the geometry; no budget, no draft limits."""
        from pyspac._native import check, ffi, lib

        slots_of = dict(zip(geometry.group, geometry.group_slots, strict=True))
        sizes = ffi.new("spac_board_geometry *")
        sizes.n_layer, sizes.n_expert, sizes.n_expert_used = (
            geometry.n_layer,
            geometry.n_expert,
            geometry.n_expert_used,
        )
        sizes.n_slots, sizes.max_batch = sum(slots_of.values()), geometry.max_batch
        sizes.n_device = 1 + max(geometry.layer_device, default=0)
        out = ffi.new("spac_board **")
        check(lib.spac_board_make(sizes, out))
        super().__init__(ffi.gc(out[0], lib.spac_board_close))
        self.expert_bytes[:] = geometry.expert_bytes
        self.group[:] = geometry.group
        self.group_slots[:] = geometry.group_slots
        self.layer_device[:] = geometry.layer_device or 0

    def _may_write(self, writer: int) -> bool:
        return True

    def record_routing(self, tokens: NDArray[np.int32], experts: NDArray[np.uint16]) -> None:
        """Append rows to the routing log, as a forward of these tokens does: [n], and as `routed_experts`."""
        row = (int(self.n_routed[0]) + np.arange(len(tokens))) % len(self.routed_tokens)
        self.routed_tokens[row] = tokens
        self.routed_experts[row] = experts
        self.n_routed[:] += np.uint64(len(tokens))


def _dtype(ffi: Any, c_type: Any) -> np.dtype[Any]:
    """Return numpy's type of a C type: a number, a text (an array of char), or a struct of these."""
    if c_type.kind == "array":
        return np.dtype(f"S{c_type.length}")
    if c_type.kind != "struct":
        name: str = c_type.cname  # "uint32_t", "double", "_Bool"
        return np.dtype(name.removesuffix("_t").strip("_").lower())
    names = [name for name, _field in c_type.fields]
    fields = [field for _name, field in c_type.fields]
    return np.dtype({
        "names": names,
        "formats": [_dtype(ffi, field.type) for field in fields],
        "offsets": [field.offset for field in fields],
        "itemsize": ffi.sizeof(c_type),
    })  # fmt: skip
