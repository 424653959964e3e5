#!/usr/bin/env python3
"""Prompts on a CPU: tokens per second at wide batches, ours beside llama.cpp's, plain and repacked.

For each type of the weights a synthetic model (12 layers of 64 experts, top-8) decodes batches of 16 to 2,048
tokens in contexts that take turns, as in bench_host_experts.py: the same build without an engine (`stock`),
with weights repacked for this CPU, llama.cpp's default (`repacked`), and ours (`spac`).

The limit is what the processor allows: the operations of a batch (two for each weight that a token meets,
attention's own products apart) at the highest of the rates measured here (f32 multiply-adds, int8 products,
bf16 tiles where there are any), or its bytes at the speed of a streaming read, whichever takes longer. F16
and BF16 weights are held against f32 and bf16 only.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import bench_host_experts
import machine
import psutil
from bench_host_experts import Setting
from peaks import measure_peaks

from pyspac.model.gguf_header import read_header

TYPES = (  # all that have kernels, but Q2_0, which the gguf package does not write
    "q8_0,q4_0,q4_1,q5_0,q5_1,iq4_nl,mxfp4,q4_k,q5_k,q6_k,iq4_xs,f16,bf16,q2_k,q3_k,"
    "iq1_s,iq1_m,iq2_xxs,iq2_xs,iq2_s,iq3_xxs,iq3_s,tq1_0,tq2_0,q1_0,nvfp4"
)
WIDTHS = "16,32,64,128,512,2048"
N_USED = 8  # experts per token of the synthetic model


def giga_operations(path: Path, n_expert: int) -> float:
    """Of one token: two for each weight that it meets, but for the output's: only the last meets them."""
    n_weights = 0.0
    for tensor in read_header(path).tensors:
        if tensor.name in ("token_embd.weight", "output.weight") or len(tensor.shape) < 2:
            continue
        share = N_USED / n_expert if "_exps" in tensor.name else 1.0
        n_weights += math.prod(tensor.shape) * share
    return 2 * n_weights / 1e9


def with_limit(row: dict[str, object], giga_ops: float, peaks: dict[str, float]) -> dict[str, object]:
    """The row of bench_host_experts.py, held against what arithmetic and memory allow."""
    kinds = ["f32", "bf16"] if row["type"] in ("f16", "bf16") else list(peaks)
    peak = max(peaks[kind] for kind in kinds)
    by_memory = float(str(row["limit_tps"]))
    limit = min(peak / giga_ops, by_memory) if peak else by_memory
    tps = float(str(row["spac_tps"]))
    return row | {
        "bench": "prompts",
        "limit_tps": round(limit, 1),
        "limit_fraction": round(tps / limit, 3),
        "gflops": round(tps * giga_ops, 1),
        "peak_gflops": peaks,
    }


def measure(qtype: str, args: argparse.Namespace) -> list[dict[str, object]]:
    widths = [int(width) for width in args.widths.split(",")]
    kernels = args.kernels.split(",") if args.kernels else [None]
    setting = Setting(qtype, widths, args.rounds, args.threads, True, kernels)
    print(f"{qtype}: measuring the processor, making the model", file=sys.stderr, flush=True)
    peaks = measure_peaks(args.threads)
    with bench_host_experts.synthetic_model(qtype, args.layers, args.experts) as path:
        rows = bench_host_experts.measure(path, setting)
        giga_ops = giga_operations(path, args.experts)
    return [with_limit(row, giga_ops, peaks) for row in rows]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--types", default=TYPES, help=f"types of the weights (default: {TYPES})")
    parser.add_argument("--widths", default=WIDTHS, help=f"tokens per batch (default: {WIDTHS})")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of all contenders (default: 5)")
    parser.add_argument(
        "--threads", type=int, default=psutil.cpu_count(logical=False), help="default: all cores"
    )
    parser.add_argument("--layers", type=int, default=12, help="layers of the model (default: 12)")
    parser.add_argument("--experts", type=int, default=64, help="experts per layer (default: 64)")
    parser.add_argument("--kernels", metavar="LIST", help="sets of our kernels (default: the best)")
    parser.add_argument("--json", metavar="PATH", help="append one JSON object per row; - for stdout")
    return parser.parse_args()


def print_row(row: dict[str, object]) -> None:
    print(
        f"{row['type']:8} {row['width']:6} {row['kernels']:8} {row['stock_tps']:10.1f} "
        f"{row['repacked_tps']:10.1f} {row['spac_tps']:10.1f} {row['ratio']:8.2f} "
        f"{row['ratio_repacked']:8.2f} {row['gflops']:8.1f} "
        f"{row['limit_fraction']:9.2f}",
        flush=True,
    )


def main() -> int:
    args = parse_arguments()
    described = machine.describe()
    to_stdout = args.json == "-"
    if not to_stdout:
        print(machine.one_line(described))
        print(f"{args.layers} layers x {args.experts} experts, top-{N_USED}; {args.threads} threads")
        print(
            f"{'type':8} {'tokens':>6} {'kernels':8} {'stock t/s':>10} {'repacked':>10} {'spac t/s':>10} "
            f"{'/ stock':>8} {'/ rep.':>8} {'gflops':>8} {'of limit':>9}"
        )
    for qtype in args.types.lower().split(","):
        bench_host_experts.report(measure(qtype, args), args, described, print_row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
