#!/usr/bin/env python3
"""Write a MoE model that says the same as another, with experts N times as wide.

    MODEL.gguf -> the same with expert_feed_forward_length x N

The new columns of `ffn_gate_exps` and `ffn_up_exps` are random and those of `ffn_down_exps` are zero: they
are read and computed like any others, and add nothing. So a small model with real text gets steps as long as
a large one's, with the same routing, drafts and acceptances: for measuring what depends on both. The new
model is put together in memory.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from gguf import GGUF_DEFAULT_ALIGNMENT, GGUFReader, GGUFValueType, GGUFWriter, ReaderField, ReaderTensor
from random_blocks import SUPPORTED, random_blocks
from rich.progress import track

from pyspac.errors import ModelError
from pyspac.model.checks import check_model_file

Array = npt.NDArray[Any]
OUTER: Final = ("ffn_gate_exps", "ffn_up_exps")  # [n_expert, n_ff, n_embd]
INNER: Final = ("ffn_down_exps",)  # [n_expert, n_embd, n_ff]
EXPERTS: Final = (*OUTER, *INNER)
ARCHITECTURE: Final = "general.architecture"
ALIGNMENT: Final = "general.alignment"
LENGTH: Final = "expert_feed_forward_length"
DENSE_LENGTH: Final = "feed_forward_length"
SHARED_LENGTH: Final = "expert_shared_feed_forward_length"


class UsageError(Exception):
    """A wrong value on the command line; the text says what to do."""


def part_of(name: str) -> str:
    """`ffn_down_exps` of `blk.3.ffn_down_exps.weight`."""
    return name.split(".")[2] if name.startswith("blk.") and name.endswith(".weight") else ""


def widened(tensor: ReaderTensor, times: int, rng: np.random.Generator) -> Array:
    """Its data, raw blocks where it is quantised: as of wider experts, if it is one of their matrices."""
    part, data = part_of(tensor.name), np.asarray(tensor.data)
    if part in OUTER:
        n_expert, n_ff = data.shape[:2]
        n_embd = int(tensor.shape[0])
        shape = (n_expert, n_ff * (times - 1), n_embd)
        more = random_blocks(rng, tensor.tensor_type, shape, n_embd**-0.5)
        return np.concatenate([data, more.view(data.dtype)], axis=1)
    if part in INNER:
        zeros = np.zeros((*data.shape[:-1], data.shape[-1] * (times - 1)), data.dtype)
        return np.concatenate([data, zeros], axis=-1)
    return data


def copy_metadata(reader: GGUFReader, writer: GGUFWriter, times: int) -> None:
    """All keys; lengths of experts times `times`.

    Without dense layers their length is that of experts too: some architectures read that one.
    """
    lengths = (LENGTH,) if has_dense(reader) else (LENGTH, DENSE_LENGTH)
    if reader.alignment != GGUF_DEFAULT_ALIGNMENT:
        writer.add_custom_alignment(reader.alignment)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in (ARCHITECTURE, ALIGNMENT):
            continue  # the writer's own
        value, kind, of = _content(field)
        if field.name.endswith(tuple(f".{length}" for length in lengths)):
            value = [n * times for n in value] if isinstance(value, list) else value * times
        writer.add_key_value(field.name, value, kind, sub_type=of)


def _content(field: ReaderField) -> tuple[Any, GGUFValueType, GGUFValueType | None]:
    of = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
    return field.contents(), field.types[0], of


def check(reader: GGUFReader, path: Path) -> None:
    """Raise UsageError unless its experts can be made wider."""
    parts = {part_of(tensor.name): tensor for tensor in reader.tensors}
    if not parts.keys() & set(INNER) or not parts.keys() & set(OUTER):
        raise UsageError(f"{path} has no experts. Give a MoE model.")
    others = [t.name for t in reader.tensors if "_exps." in t.name and part_of(t.name) not in EXPERTS]
    if others:
        raise UsageError(f"{path} has {others[0]}, which this program cannot make wider.")
    if not _has(reader, LENGTH):
        raise UsageError(f"{path} does not say {LENGTH}: its experts are as wide as its dense layers.")
    if any("_shexp." in t.name for t in reader.tensors) and not _has(reader, SHARED_LENGTH):
        raise UsageError(
            f"{path} does not say {SHARED_LENGTH}: its shared experts are as wide as the others."
        )
    for tensor in (parts[part] for part in OUTER if part in parts):
        if tensor.tensor_type not in SUPPORTED:
            raise UsageError(
                f"{path}: {tensor.name} is {tensor.tensor_type.name}, which has no random blocks."
            )


def has_dense(reader: GGUFReader) -> bool:
    """Whether a layer has a feed-forward part without experts."""
    return any(part_of(tensor.name) == "ffn_down" for tensor in reader.tensors)


def _has(reader: GGUFReader, key: str) -> bool:
    return any(name.endswith(f".{key}") for name in reader.fields)


def write(reader: GGUFReader, path: Path, times: int) -> None:
    """Write it in a folder beside `path`, then move it there."""
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as scratch:
        partial = Path(scratch) / path.name
        writer = GGUFWriter(partial, reader.fields[ARCHITECTURE].contents())
        copy_metadata(reader, writer, times)
        for tensor in track(reader.tensors, path.name):
            data = widened(tensor, times, rng)
            writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        partial.replace(path)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: the demo's text in steps of 5 to 10 ms on one or two cores\n"
        "  widen_gguf.py pyspac/models/demo-moe.gguf build/demo-wide.gguf --times 32",
    )
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    parser.add_argument("path", type=Path, metavar="OUT.gguf", help="an existing one is kept unless --force")
    parser.add_argument("--times", type=int, default=32, metavar="N", help="2 to 256 (default: %(default)s)")
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")
    return parser.parse_args(argv)


def open_model(args: argparse.Namespace) -> GGUFReader:
    """Raises UsageError, ModelError."""
    if not 2 <= args.times <= 256:
        raise UsageError(f"--times {args.times}: give 2 to 256.")
    check_model_file(args.model)
    if args.path.exists() and not args.path.is_file():
        raise UsageError(f"{args.path} is no file that could be replaced. Choose another name.")
    if args.path.exists() and not args.force:
        raise UsageError(f"{args.path} exists. Choose another name, or overwrite it with --force.")
    if not args.path.parent.is_dir():
        raise UsageError(f"{args.path.parent} is not a folder. Create it first.")
    if args.path.exists() and args.path.samefile(args.model):
        raise UsageError(f"{args.path} is the model itself. Choose another name.")
    reader = GGUFReader(args.model)
    check(reader, args.model)
    n_bytes = sum(
        tensor.n_bytes * (args.times if part_of(tensor.name) in EXPERTS else 1) for tensor in reader.tensors
    )
    if (free := shutil.disk_usage(args.path.parent).free) < n_bytes:
        raise UsageError(
            f"{args.path.parent} has {free / 1e9:.1f} GB free, the model needs {n_bytes / 1e9:.1f} GB. "
            "Use fewer --times or another folder."
        )
    return reader


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    try:
        write(open_model(args), args.path, args.times)
    except (UsageError, ModelError, OSError) as error:
        print(f"widen_gguf: {error}", file=sys.stderr)
        return 2
    print(f"{args.path}: experts {args.times} times as wide, {args.path.stat().st_size / 1e9:.2f} GB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
