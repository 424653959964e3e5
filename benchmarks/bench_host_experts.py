#!/usr/bin/env python3
"""Tokens per second with every expert on the host: the engine's own kernels beside llama.cpp's.

For each type of the experts' weights a synthetic model (12 layers of 64 experts, top-8) decodes the same
tokens in two contexts that take turns, round by round: `stock` (the same build, no engine) and `spac` (an
engine with the device "none", loaded as `pyspac run --device none` does: in memory with huge pages). The
whole decode is timed, attention and output included.

With --kernels there is one such context for each of the named sets, on the same weights, and a row for each.

The limit is what memory allows: width / (bytes of the experts in use and of all other weights, the table of
token embeddings apart / speed of a streaming read), measured in the same run. From about 64 tokens on,
arithmetic limits both long before memory.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import machine
import numpy as np
import psutil
from bench_overhead import load_model

from pyspac.engine.engine import Engine, host_buffer_type, measure_host_gb_s
from pyspac.engine.params import EngineParams
from pyspac.forward.context import Context, ContextParams
from pyspac.forward.model import ALL_TENSORS, LOAD_MODE_NONE, Model, ModelParams
from pyspac.model.gguf_header import read_header

TYPES = (
    "q8_0,q4_k,q5_k,q6_k,iq4_xs,q4_0,mxfp4,f16,bf16,"
    "q3_k,iq3_s,iq3_xxs,q2_k,iq2_s,iq2_xs,iq2_xxs,tq2_0,tq1_0,iq1_m,iq1_s,q1_0,nvfp4"
)
WIDTHS = "1,2,3,5,9,16,64,512"
N_PROMPT = 32  # tokens in the cache before the first timed step
FIRST_TOKEN = 300  # the synthetic vocabulary's words begin at 259
N_TOKENS_PER_ROUND = 48  # at least; one step where the width is larger
N_OUTPUTS_MAX = 16  # rows of logits: all tokens of a verified draft, the last one of a prompt


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to decode."""

    name: str
    ctx: Context


@dataclass(frozen=True, slots=True)
class Setting:
    """What is measured with one model."""

    qtype: str
    widths: list[int]
    n_rounds: int
    n_threads: int
    with_repacked: bool
    kernels: list[str | None]  # sets of the engine's kernels; None: the best


# ---- models and contexts -------------------------------------------------------------------------


@contextlib.contextmanager
def synthetic_model(qtype: str, n_layer: int, n_expert: int) -> Iterator[Path]:
    """A model with experts of `qtype`, deleted afterwards."""
    sys.path.insert(0, str(machine.REPOSITORY / "scripts"))
    make_synthetic_gguf = importlib.import_module("make_synthetic_gguf")

    with tempfile.TemporaryDirectory(prefix="pyspac-bench-") as folder:
        path = Path(folder) / f"{qtype}.gguf"
        sizes = ["--layers", str(n_layer), "--experts", str(n_expert)]
        with contextlib.redirect_stdout(sys.stderr):
            if make_synthetic_gguf.main([str(path), "--type", qtype, *sizes]) != 0:
                sys.exit(2)
        yield path


def load_for_engine(path: Path) -> Model:
    """As `pyspac run --device none` does."""
    return Model(
        ModelParams(
            path=path,
            buft=host_buffer_type(),
            buft_tensors=ALL_TENSORS,
            use_extra_bufts=False,
            load_mode=LOAD_MODE_NONE,
        )
    )


def dense_bytes_of(path: Path, expert_bytes: int) -> int:
    """Bytes of the weights that every token reads: no experts, and of the embeddings one row only."""
    tensors = {tensor.name: tensor.n_bytes for tensor in read_header(path).tensors}
    return sum(tensors.values()) - expert_bytes - tensors["token_embd.weight"]


def new_context(model: Model, setting: Setting) -> Context:
    widest = max(setting.widths)
    n_ctx = N_PROMPT + max(widest, N_TOKENS_PER_ROUND + widest)
    return Context(
        model,
        ContextParams(
            n_ctx=n_ctx,
            n_ubatch=max(widest, N_PROMPT),
            n_outputs_max=min(widest, N_OUTPUTS_MAX),
            n_threads=setting.n_threads,
        ),
    )


@contextlib.contextmanager
def attached(ctx: Context, kernels: str | None) -> Iterator[Engine]:
    """An engine without slots: its kernels compute every expert."""
    assert ctx.ptr is not None
    if kernels is not None:
        os.environ["PYSPAC_KERNELS"] = kernels  # read when an engine is attached
    engine = Engine.attach(ctx.ptr, EngineParams(device="none", cache="0", host_kernels="spac"))
    try:
        info = engine.info()
        if info.n_layer_kernels != info.n_layer_split:
            raise RuntimeError(f"kernels for {info.n_layer_kernels} of {info.n_layer_split} layers only")
        if kernels not in (None, info.kernels):
            raise RuntimeError(f"this machine has no kernels {kernels}: the engine took {info.kernels}")
        yield engine
    finally:
        engine.close()


# ---- timing --------------------------------------------------------------------------------------


def n_outputs(width: int) -> int:
    return width if width <= N_OUTPUTS_MAX else 1


def n_steps(width: int) -> int:
    return max(1, N_TOKENS_PER_ROUND // width)


def bytes_per_step(engine: Engine, ctx: Context, width: int, first: int, dense_bytes: int) -> float:
    """Weights that one step reads: the experts in use, counted by the engine, and all that is no expert."""
    engine.end_forward()
    before = engine.board.layer_stats["n_host_experts"].copy()
    ctx.clear()
    decode_steps(ctx, width, first)
    engine.end_forward()
    n_experts = engine.board.layer_stats["n_host_experts"] - before  # [n_layer]
    return float((n_experts * engine.board.expert_bytes).sum()) / n_steps(width) + dense_bytes


def interleave(
    contenders: list[Contender], setting: Setting, n_vocab: int
) -> tuple[dict[tuple[str, int], list[float]], list[float]]:
    """Milliseconds per step {(contender, width): [n_rounds]}, and read speeds in GB/s; turns rotate."""
    times: dict[tuple[str, int], list[float]] = {(c.name, w): [] for c in contenders for w in setting.widths}
    speeds: list[float] = []
    rng = np.random.default_rng(0)
    for i_round in range(setting.n_rounds):
        if i_round % 2 == 0:
            speeds.append(measure_host_gb_s(setting.n_threads))
        for width in setting.widths:
            last = n_vocab - n_steps(width) * width
            first = int(rng.integers(FIRST_TOKEN + N_PROMPT, last))
            for i in range(len(contenders)):
                contender = contenders[(i + i_round) % len(contenders)]
                times[contender.name, width].append(timed_width(contender.ctx, width, first))
        print(
            f"\r{setting.qtype}: round {i_round + 1}/{setting.n_rounds}", end="", file=sys.stderr, flush=True
        )
    print(file=sys.stderr)
    return times, speeds


def decode_steps(ctx: Context, width: int, first: int) -> None:
    for step in range(n_steps(width)):
        ctx.decode(range(first + step * width, first + (step + 1) * width), n_outputs(width))


def timed_width(ctx: Context, width: int, first: int) -> float:
    """Milliseconds per step of `width` tokens, after a short prompt."""
    ctx.clear()
    ctx.decode(range(first - N_PROMPT, first))
    start = time.perf_counter()
    decode_steps(ctx, width, first)
    return (time.perf_counter() - start) * 1000 / n_steps(width)


# ---- one type ------------------------------------------------------------------------------------


def measure(path: Path, setting: Setting) -> list[dict[str, object]]:
    """Rows of one type, one per width."""
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(load_model(path, repacked=False))
        stock = stack.enter_context(new_context(model, setting))
        own = stack.enter_context(load_for_engine(path))
        contenders, engines = [Contender("stock", stock)], []
        for kernels in setting.kernels:
            spac = stack.enter_context(new_context(own, setting))
            engines.append(stack.enter_context(attached(spac, kernels)))
            contenders.append(Contender(engines[-1].info().kernels, spac))
        engine = engines[-1]
        if setting.with_repacked:
            repacked = stack.enter_context(load_model(path, repacked=True))
            contenders.append(Contender("repacked", stack.enter_context(new_context(repacked, setting))))
        for contender in contenders:
            for width in setting.widths:  # allocates every graph that will be timed
                timed_width(contender.ctx, width, FIRST_TOKEN + N_PROMPT)
        n_vocab = model.vocab.n_tokens
        dense_bytes = dense_bytes_of(path, engine.info().total_bytes)
        n_bytes = {
            width: bytes_per_step(engine, spac, width, FIRST_TOKEN, dense_bytes) for width in setting.widths
        }
        times, speeds = interleave(contenders, setting, n_vocab)
        names = [engine.info().kernels for engine in engines]
    return [
        {"bench": "host_experts", "type": setting.qtype, "width": width}
        | summarise(times, name, width, n_bytes[width], float(np.median(speeds)))
        | {"n_rounds": setting.n_rounds, "kernels": name}
        for width in setting.widths
        for name in names
    ]


def summarise(
    times: dict[tuple[str, int], list[float]], name: str, width: int, n_bytes: float, gb_s: float
) -> dict[str, object]:
    """Speeds, ratios and the share of the limit that the kernels `name` reached at one width."""
    stock, spac = np.array(times["stock", width]), np.array(times[name, width])
    ratio_p10, ratio, ratio_p90 = np.percentile(stock / spac, [10, 50, 90])
    spac_tps = width * 1000 / float(np.median(spac))
    limit_tps = width / (n_bytes / (gb_s * 1e9))
    row: dict[str, object] = {
        "stock_tps": round(width * 1000 / float(np.median(stock)), 1),
        "spac_tps": round(spac_tps, 1),
        "ratio": round(float(ratio), 3),
        "ratio_p10": round(float(ratio_p10), 3),
        "ratio_p90": round(float(ratio_p90), 3),
        "limit_tps": round(limit_tps, 1),
        "limit_fraction": round(spac_tps / limit_tps, 3),
        "read_gb_s": round(gb_s, 1),
        "step_mb": round(n_bytes / 1e6, 1),
    }
    if ("repacked", width) in times:
        repacked = np.array(times["repacked", width])
        row["repacked_tps"] = round(width * 1000 / float(np.median(repacked)), 1)
        row["ratio_repacked"] = round(float(np.median(repacked / spac)), 3)
    return row


# ---- command line --------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--types", default=TYPES, help=f"types of the experts' weights (default: {TYPES})")
    parser.add_argument("--widths", default=WIDTHS, help=f"tokens per step (default: {WIDTHS})")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of all contenders (default: 9)")
    parser.add_argument(
        "--threads", type=int, default=psutil.cpu_count(logical=False), help="default: all cores"
    )
    parser.add_argument("--layers", type=int, default=12, help="layers of the model (default: 12)")
    parser.add_argument("--experts", type=int, default=64, help="experts per layer (default: 64)")
    parser.add_argument(
        "--repacked",
        action="store_true",
        help="a third contender: stock with weights repacked for this CPU, llama.cpp's default",
    )
    parser.add_argument(
        "--kernels",
        metavar="LIST",
        help="sets of the engine's kernels, such as avx512,avxvnni,avx2 (default: the best)",
    )
    parser.add_argument("--json", metavar="PATH", help="append one JSON object per row; - for stdout")
    return parser.parse_args()


def print_head(repacked: bool) -> None:
    head = f"{'type':8} {'tokens':>6} {'kernels':8} {'stock t/s':>10} {'spac t/s':>10} {'ratio':>6}"
    head += f" {'p10..p90':>13} {'of limit':>9}"
    print(head + (f" {'repacked':>10} {'ratio':>6}" if repacked else ""))


def print_row(row: dict[str, object]) -> None:
    spread = f"{row['ratio_p10']:.2f}..{row['ratio_p90']:.2f}"
    line = (
        f"{row['type']:8} {row['width']:6} {row['kernels']:8} {row['stock_tps']:10.1f} "
        f"{row['spac_tps']:10.1f} {row['ratio']:6.2f} {spread:>13} {row['limit_fraction']:9.2f}"
    )
    if "repacked_tps" in row:
        line += f" {row['repacked_tps']:10.1f} {row['ratio_repacked']:6.2f}"
    print(line, flush=True)


def report(rows: list[Any], args: argparse.Namespace, described: Any, shown: Callable[[Any], None]) -> None:
    """As JSON lines on stdout (`--json -`), else one by one, and to the end of `args.json` if it is given."""
    lines = [json.dumps(row | {"n_threads_used": args.threads, "machine": described}) for row in rows]
    if args.json == "-":
        print("\n".join(lines), flush=True)
        return
    for row in rows:
        shown(row)
    if args.json:
        with Path(args.json).open("a") as file:
            file.write("\n".join(lines) + "\n")


def main() -> int:
    args = parse_arguments()
    described = machine.describe()
    to_stdout = args.json == "-"
    if not to_stdout:
        print(machine.one_line(described))
        print(f"{args.layers} layers x {args.experts} experts, top-8; {args.threads} threads")
        print_head(args.repacked)
    for qtype in args.types.lower().split(","):
        widths = [int(width) for width in args.widths.split(",")]
        kernels = args.kernels.split(",") if args.kernels else [None]
        setting = Setting(qtype, widths, args.rounds, args.threads, args.repacked, kernels)
        with synthetic_model(qtype, args.layers, args.experts) as path:
            rows = measure(path, setting)
        report(rows, args, described, print_row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
