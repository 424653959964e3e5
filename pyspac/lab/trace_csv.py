"""Traces as CSV: a file that begins with `# route_trace v1` in, a Trace out.

A row is one (token, layer, rank); every step is one token.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from pyspac.lab.trace import NOT_RUN, TokenStatus, Trace, TraceError, TraceGeometry

MAGIC: Final = "# route_trace v1"
COLUMNS: Final = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes"
_LAYER: Final = r"layer=(\d+) expert_bytes=(\d+) dense_bytes=(\d+)"


def read_csv(path: Path) -> Trace:
    """Read one file; TraceError says what is wrong with it."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    n_head = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    if n_head == len(lines) or lines[n_head].strip() != COLUMNS:
        raise TraceError(f"{path}: after its header this trace needs the columns {COLUMNS}, and lacks them")
    geometry = _geometry(path, lines[:n_head])
    if len(lines) == n_head + 1:
        raise TraceError(f"{path}: this trace ends after its header; it has no rows")
    try:
        rows = np.loadtxt(lines[n_head + 1 :], delimiter=",", ndmin=2)  # [n_row, 9] float64
    except ValueError as error:
        raise TraceError(f"{path}: a row cannot be read; the file may be cut off ({error})") from error
    if rows.shape[1] != len(COLUMNS.split(",")):
        raise TraceError(f"{path}: the rows have {rows.shape[1]} columns, but they should be {COLUMNS}")
    return _trace(path, geometry, rows)


def _geometry(path: Path, header: Sequence[str]) -> TraceGeometry:
    text = "\n".join(header)
    found = dict(re.findall(r"\b(model|arch|n_layer|n_expert|n_expert_used)=(\S+)", text))
    sizes = {int(a): (int(b), int(c)) for a, b, c in re.findall(_LAYER, text)}
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
        raise TraceError(f"{path}: the trace's header lacks a readable {error}") from error


def _trace(path: Path, geometry: TraceGeometry, rows: npt.NDArray[np.float64]) -> Trace:
    """Lay the rows out as arrays; `rows` is [n_row, 9] in the order of COLUMNS."""
    turn, phase, step, layer, slot, expert = rows[:, :6].astype(np.int64).T
    is_inside = layer.max() < geometry.n_layer and slot.max() < geometry.n_expert_used
    if not is_inside or min(layer.min(), slot.min()) < 0:
        raise TraceError(f"{path}: a row names a layer or a rank that lies outside the header's geometry")
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
