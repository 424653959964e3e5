"""Traces as files: `write_trace` writes Parquet, `read_trace` reads that and the CSV of `trace_csv.py`.

Parquet has one row per (token, layer) that ran, and the model's geometry in its metadata.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pyspac.lab import trace_csv
from pyspac.lab.trace import NOT_RUN, Trace, TraceError, TraceGeometry

FORMAT_VERSION: Final = 1
METADATA_KEY: Final = b"pyspac.trace"
PARQUET_MAGIC: Final = b"PAR1"
EARLY_COLUMNS: Final = ("early_logits", "early_logits_2", "early_logits_3")  # by layers ahead
NEEDED: Final = ("step", "position", "status", "token", "layer", "experts", "weights")


def read_trace(path: Path) -> Trace:
    """Read a Parquet or CSV trace; TraceError says what is wrong with the file."""
    if not path.is_file():
        raise TraceError(
            f"{path}: there is no such trace file: record one with `pyspac trace -m MODEL -o FILE`"
        )
    try:
        with path.open("rb") as file:
            magic = file.read(len(trace_csv.MAGIC))
    except OSError as error:
        raise TraceError(f"{path}: this trace cannot be read ({error.strerror})") from error
    if magic.startswith(PARQUET_MAGIC):
        return _read_parquet(path)
    if magic == trace_csv.MAGIC.encode():
        return trace_csv.read_csv(path)
    raise TraceError(
        f"{path}: this is neither a Parquet trace nor a CSV that begins with {trace_csv.MAGIC!r}: "
        "record a trace with `pyspac trace`"
    )


def write_trace(trace: Trace, path: Path) -> None:
    """Write Parquet; TraceError if the file cannot be written or pyarrow is missing."""
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
    if trace.token_id is not None:
        columns["token_id"] = pa.array(trace.token_id[token])
    arrays: dict[str, npt.NDArray[Any] | None] = {
        "experts": trace.experts, "weights": trace.weights,
        "logits": trace.logits, "draft_logits": trace.draft_logits,
    }  # fmt: skip
    if trace.early_logits is not None:
        arrays |= dict(zip(EARLY_COLUMNS, trace.early_logits, strict=False))
    for name, values in arrays.items():
        if values is not None:
            flat = values.reshape(-1, values.shape[-1])[ran]
            columns[name] = pa.FixedSizeListArray.from_arrays(pa.array(flat.ravel()), values.shape[-1])
    header = json.dumps({"version": FORMAT_VERSION, "geometry": asdict(g)})
    table = pa.table(columns).replace_schema_metadata({METADATA_KEY: header.encode()})
    try:
        pa.parquet.write_table(table, path, compression="zstd")
    except OSError as error:
        raise TraceError(f"{path}: this trace cannot be written ({error})") from error


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise TraceError(
            "Parquet traces need pyarrow: install it with `pip install 'pyspac[lab]'`"
        ) from error
    return pyarrow


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
        raise TraceError(
            f"{path}: this is a Parquet file, but not a trace of `pyspac trace` (it has no {error})"
        ) from error
    except (OSError, ValueError) as error:
        raise TraceError(
            f"{path}: this file cannot be read as Parquet; it may be cut off ({error})"
        ) from error
    if version != FORMAT_VERSION:
        raise TraceError(
            f"{path}: this trace has format version {version}; this pyspac reads {FORMAT_VERSION}"
        )
    return _from_table(TraceGeometry(**fields), table, path)


def _from_table(geometry: TraceGeometry, table: Any, path: Path) -> Trace:
    has = set(table.column_names)
    missing = sorted(set(NEEDED) - has)
    if missing:
        raise TraceError(f"{path}: this trace lacks the columns {', '.join(missing)}")
    token, layer = (table[name].to_numpy() for name in ("token", "layer"))
    n_token = int(token.max()) + 1 if len(token) else 0

    def per_token(name: str) -> npt.NDArray[Any]:
        """[n_token]"""
        column = table[name].to_numpy()
        out = np.zeros(n_token, column.dtype)
        out[token] = column
        return out

    def per_layer(name: str, fill: float) -> npt.NDArray[Any]:
        """[n_token, n_layer, n], with `fill` where a layer did not run."""
        values = table[name].combine_chunks()
        flat = values.flatten().to_numpy(zero_copy_only=False).reshape(len(token), -1)
        out = np.full((n_token, geometry.n_layer, flat.shape[1]), fill, flat.dtype)
        out[token, layer] = flat
        return out

    early = [per_layer(name, np.nan) for name in EARLY_COLUMNS if name in has]
    return Trace(
        geometry=geometry,
        step=per_token("step"),
        position=per_token("position"),
        status=per_token("status"),
        token_id=per_token("token_id") if "token_id" in has else None,
        experts=per_layer("experts", NOT_RUN),
        weights=per_layer("weights", 0.0),
        logits=per_layer("logits", np.nan) if "logits" in has else None,
        early_logits=np.stack(early) if early else None,
        draft_logits=per_layer("draft_logits", np.nan) if "draft_logits" in has else None,
        source=str(path),
    )
