"""Routing traces: which experts each token used in each layer, as arrays and as files.

A `Trace` holds one row per token that was routed: [n_token, n_layer, n_expert_used] experts and router
weights, optionally all router logits and the next layer's router applied early. Files: Parquet with the
model's geometry in the metadata (`write_trace`, `read_trace`), and a reader for the CSV format that begins
with `# route_trace v1`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pyspac.errors import PyspacError

FORMAT_VERSION: Final = 1
METADATA_KEY: Final = b"pyspac.trace"
CSV_MAGIC: Final = "# route_trace v1"
CSV_COLUMNS: Final = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes"
NOT_RUN: Final = -1  # in `experts`: the layer did not run for this token, or is dense


class TraceError(PyspacError):
    """A trace file cannot be used: missing, of another format, cut off, or without what is asked for."""

    exit_code = 2


class TokenStatus(IntEnum):
    """What became of a token: part of the prompt, the target's own choice, or a draft's fate."""

    PROMPT = 0
    SAMPLED = 1
    ACCEPTED = 2
    REJECTED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceGeometry:
    """The traced model. Lists are per layer; a dense layer has `expert_bytes` 0."""

    model: str
    architecture: str
    n_layer: int
    n_expert: int
    n_expert_used: int
    expert_bytes: tuple[int, ...]
    dense_bytes: tuple[int, ...]  # read for every token, whatever the router says
    group: tuple[int, ...] = ()  # layout group; (): layers with equal expert_bytes share one

    def __post_init__(self) -> None:
        for name in ("expert_bytes", "dense_bytes"):
            if len(getattr(self, name)) != self.n_layer:
                raise TraceError(f"the trace has {len(getattr(self, name))} {name} for {self.n_layer} layers")
        if min(self.n_layer, self.n_expert, self.n_expert_used) < 1 or self.n_expert_used > self.n_expert:
            raise TraceError(
                f"the trace's geometry makes no sense: {self.n_layer} layers, {self.n_expert} experts, "
                f"{self.n_expert_used} used"
            )
        if not self.group:
            first_seen = {size: i for i, size in enumerate(dict.fromkeys(b for b in self.expert_bytes if b))}
            object.__setattr__(self, "group", tuple(first_seen.get(size, 0) for size in self.expert_bytes))

    @property
    def n_moe_layer(self) -> int:
        """Layers with experts."""
        return sum(size > 0 for size in self.expert_bytes)

    @property
    def total_bytes(self) -> int:
        """All experts of all layers."""
        return self.n_expert * sum(self.expert_bytes)

    @property
    def n_group(self) -> int:
        """Layout groups; slots are shared within a group only."""
        return max(self.group) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Tokens in the order they were computed; a step is one forward pass of the target."""

    geometry: TraceGeometry
    step: npt.NDArray[np.int32]  # [n_token] forward pass, rising; prompt pieces have their own
    position: npt.NDArray[np.int32]  # [n_token] in the sequence
    status: npt.NDArray[np.uint8]  # [n_token] TokenStatus
    experts: npt.NDArray[np.int16]  # [n_token, n_layer, n_expert_used], best first; NOT_RUN: none
    weights: npt.NDArray[np.float32]  # the same shape
    logits: npt.NDArray[np.float16] | None = None  # [n_token, n_layer, n_expert] of the router
    early_logits: npt.NDArray[np.float16] | None = None  # the same, from the previous layer's hidden state
    source: str = field(default="", compare=False)  # file it was read from

    def __post_init__(self) -> None:
        g, n = self.geometry, len(self.step)
        shape = (n, g.n_layer, g.n_expert_used)
        if self.experts.shape != shape or self.weights.shape != shape:
            raise TraceError(f"the trace's experts have shape {self.experts.shape}, expected {shape}")
        if n == 0:
            raise TraceError("the trace holds no token")
        if np.any(np.diff(self.step) < 0):
            raise TraceError("the trace's steps do not rise from token to token")
        if self.experts.max() >= g.n_expert or self.experts.min() < NOT_RUN:
            raise TraceError(f"the trace names experts outside 0 .. {g.n_expert - 1}")

    @property
    def n_token(self) -> int:
        """Tokens computed, rejected drafts included."""
        return len(self.step)

    @property
    def n_prompt(self) -> int:
        """Tokens of the prompt."""
        return int(np.count_nonzero(self.status == TokenStatus.PROMPT))

    @property
    def has_drafts(self) -> bool:
        """Whether drafted tokens were verified while recording."""
        return bool(np.any(self.status > TokenStatus.SAMPLED))


def read_trace(path: Path) -> Trace:
    """Read a Parquet or CSV trace; TraceError says what is wrong with the file."""
    if not path.is_file():
        raise TraceError(f"{path}: no such trace file; record one with `pyspac trace -m MODEL -o FILE`")
    try:
        with path.open("rb") as file:
            magic = file.read(len(CSV_MAGIC))
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror})") from error
    if magic[:4] == b"PAR1":
        return _read_parquet(path)
    if magic == CSV_MAGIC.encode():
        return _read_csv(path)
    raise TraceError(
        f"{path}: neither a Parquet trace nor a CSV that begins with {CSV_MAGIC!r}; "
        "record one with `pyspac trace`"
    )


# ------------------------------------------------------------------------------------------------------ CSV


def _read_csv(path: Path) -> Trace:
    """One row per (token, layer, rank); every step is one token."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    n_head = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    if n_head == len(lines) or lines[n_head].strip() != CSV_COLUMNS:
        raise TraceError(f"{path}: the columns are not {CSV_COLUMNS}")
    geometry = _csv_geometry(path, lines[:n_head])
    if len(lines) == n_head + 1:
        raise TraceError(f"{path}: no rows of {CSV_COLUMNS}")
    try:
        rows = np.loadtxt(lines[n_head + 1 :], delimiter=",", ndmin=2)  # [n_row, 9] float64
    except ValueError as error:
        raise TraceError(f"{path}: a row cannot be read, the file may be cut off ({error})") from error
    if rows.shape[1] != len(CSV_COLUMNS.split(",")):
        raise TraceError(f"{path}: rows of {rows.shape[1]} columns instead of {CSV_COLUMNS}")
    return _csv_trace(path, geometry, rows)


def _csv_geometry(path: Path, header: Sequence[str]) -> TraceGeometry:
    text = "\n".join(header)
    found = dict(re.findall(r"\b(model|arch|n_layer|n_expert|n_expert_used)=(\S+)", text))
    sizes = {int(a): (int(b), int(c)) for a, b, c in re.findall(_CSV_LAYER, text)}
    try:
        n_layer = int(found["n_layer"])
        return TraceGeometry(
            model=found["model"],
            architecture=found["arch"],
            n_layer=n_layer,
            n_expert=int(found["n_expert"]),
            n_expert_used=int(found["n_expert_used"]),
            expert_bytes=tuple(sizes.get(il, (0, 0))[0] for il in range(n_layer)),
            dense_bytes=tuple(sizes.get(il, (0, 0))[1] for il in range(n_layer)),
        )
    except (KeyError, ValueError) as error:
        raise TraceError(f"{path}: the header lacks a readable {error}") from error


_CSV_LAYER: Final = r"layer=(\d+) expert_bytes=(\d+) dense_bytes=(\d+)"


def _csv_trace(path: Path, geometry: TraceGeometry, rows: npt.NDArray[np.float64]) -> Trace:
    turn, phase, step, layer, slot, expert = rows[:, :6].astype(np.int64).T
    if (
        layer.max() >= geometry.n_layer
        or slot.max() >= geometry.n_expert_used
        or min(layer.min(), slot.min()) < 0
    ):
        raise TraceError(f"{path}: a row names a layer or a rank outside the header's geometry")
    _, first, token = np.unique(turn * (step.max() + 1) + step, return_index=True, return_inverse=True)
    shape = (len(first), geometry.n_layer, geometry.n_expert_used)
    experts = np.full(shape, NOT_RUN, np.int16)
    weights = np.zeros(shape, np.float32)
    experts[token, layer, slot] = expert
    weights[token, layer, slot] = rows[:, 6]
    return Trace(
        geometry=geometry,
        step=np.arange(len(first), dtype=np.int32),
        position=step[first].astype(np.int32),
        status=np.where(phase[first] == 0, TokenStatus.PROMPT, TokenStatus.SAMPLED).astype(np.uint8),
        experts=experts,
        weights=weights,
        source=str(path),
    )


# -------------------------------------------------------------------------------------------------- Parquet


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise TraceError("Parquet traces need pyarrow: pip install 'pyspac[lab]'") from error
    return pyarrow


def write_trace(trace: Trace, path: Path) -> None:
    """Write Parquet: one row per (token, layer) that ran."""
    pa = _pyarrow()
    g = trace.geometry
    ran = np.flatnonzero((trace.experts[:, :, 0] != NOT_RUN).ravel())
    token, layer = np.divmod(ran, g.n_layer)
    columns = {
        "step": pa.array(trace.step[token]),
        "position": pa.array(trace.position[token]),
        "status": pa.array(trace.status[token]),
        "token": pa.array(token.astype(np.int32)),
        "layer": pa.array(layer.astype(np.int16)),
    }
    for name in ("experts", "weights", "logits", "early_logits"):
        values = getattr(trace, name)
        if values is not None:
            flat = values.reshape(-1, values.shape[-1])[ran]
            columns[name] = pa.FixedSizeListArray.from_arrays(pa.array(flat.ravel()), values.shape[-1])
    header = json.dumps({"version": FORMAT_VERSION, "geometry": asdict(g)})
    table = pa.table(columns).replace_schema_metadata({METADATA_KEY: header.encode()})
    try:
        pa.parquet.write_table(table, path, compression="zstd")
    except OSError as error:
        raise TraceError(f"{path}: cannot be written ({error})") from error


def _read_parquet(path: Path) -> Trace:
    pa = _pyarrow()
    try:
        table = pa.parquet.read_table(path)
        header = json.loads((table.schema.metadata or {})[METADATA_KEY])
        fields: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in header["geometry"].items()
        }
        version = header["version"]
    except KeyError as error:
        raise TraceError(f"{path}: a Parquet file, but not a trace of `pyspac trace` (no {error})") from error
    except (OSError, ValueError) as error:
        raise TraceError(f"{path}: cannot be read as Parquet, it may be cut off ({error})") from error
    if version != FORMAT_VERSION:
        raise TraceError(f"{path}: format version {version}, this pyspac reads {FORMAT_VERSION}")
    return _trace_from_table(TraceGeometry(**fields), table, path)


def _trace_from_table(geometry: TraceGeometry, table: Any, path: Path) -> Trace:
    missing = {"step", "position", "status", "token", "layer", "experts", "weights"} - set(table.column_names)
    if missing:
        raise TraceError(f"{path}: columns are missing: {', '.join(sorted(missing))}")
    token, layer = (table[name].to_numpy() for name in ("token", "layer"))
    n_token = int(token.max()) + 1 if len(token) else 0

    def per_token(name: str) -> npt.NDArray[Any]:
        column = table[name].to_numpy()
        out = np.zeros(n_token, column.dtype)
        out[token] = column
        return out

    def per_layer(name: str, fill: float) -> npt.NDArray[Any]:
        values = table[name].combine_chunks()
        flat = values.flatten().to_numpy(zero_copy_only=False).reshape(len(token), -1)
        out = np.full((n_token, geometry.n_layer, flat.shape[1]), fill, flat.dtype)
        out[token, layer] = flat
        return out

    has = set(table.column_names)
    return Trace(
        geometry=geometry,
        step=per_token("step"),
        position=per_token("position"),
        status=per_token("status"),
        experts=per_layer("experts", NOT_RUN),
        weights=per_layer("weights", 0.0),
        logits=per_layer("logits", np.nan) if "logits" in has else None,
        early_logits=per_layer("early_logits", np.nan) if "early_logits" in has else None,
        source=str(path),
    )
