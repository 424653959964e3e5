"""Counts what a decoding step calls of CUDA, on the emulated GPU: the table of docs/gpu.md.

    python -m tools.cuda_emulator --no-tests     builds it
    python -m tools.cuda_emulator.calls          of the demo model, one token per step, half of it resident

In: build/cuda-emulated/ARCH/libggml-cuda.so. Out: a line per way to run and kind of call, with its number per
step, of the thread that decodes. Steps are warm: each part of the graph is replayed as a CUDA graph.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tools.cuda_emulator.toolkit import ROOT

FORMS = {
    "stock": "stock, --cpu-moe",
    "executor": "split, with stops",
    "in-stream": "split, in the stream",
    "some-whole": "in the stream, half of the layers whole",
    "all-whole": "all layers whole",
}
N_WHOLE = {"some-whole": 3, "all-whole": 6}  # layers of the demo model
KINDS = {
    "cudaStreamSynchronize": "waits",
    "cudaEventSynchronize": "waits",
    "cudaMemcpyAsync": "copies",
    "cudaMemsetAsync": "copies",
    "kernel": "kernel launches",
    "cublas": "kernel launches",
    "cudaGraphLaunch": "graph launches",
    "cudaLaunchHostFunc": "host functions",
    "cudaEventRecord": "events",
    "cudaStreamWaitEvent": "events",
}
COLUMNS = tuple(dict.fromkeys(KINDS.values()))
N_WARM, N_COUNTED = 8, 4  # some until layers are whole, three until their graph is recorded
MARK = "- mark\n"


def decode(form: str, model: Path, trace: Path) -> None:
    """Decode warm steps, then those that are counted, after a mark in the trace."""
    from logits import load

    from pyspac.engine.devices import choose_device
    from pyspac.engine.engine import Engine
    from pyspac.engine.params import EngineParams
    from pyspac.forward.context import Context, ContextParams

    device = choose_device("CUDA0")
    with load(model, device, experts_on_host=True) as opened:
        params = ContextParams(n_ctx=256, n_outputs_max=1, n_threads=2, op_offload=True)
        with Context(opened, params) as context:
            engine = None
            if form != "stock":
                assert context.ptr is not None
                n_whole = N_WHOLE.get(form, 0)
                mode = "in-stream" if n_whole else form
                cache = f"{max(3, n_whole) / 6:.0%}"
                engine = Engine.attach(
                    context.ptr, EngineParams(device=device.name, cache=cache, host_mode=mode)
                )
                with engine.board.decision():
                    engine.board.want_whole[:n_whole] = 1
            for step in range(N_WARM + N_COUNTED):
                if step == N_WARM:
                    with trace.open("a") as file:
                        file.write(MARK)
                context.decode([step + 1])
                if engine:
                    engine.end_forward()
                    engine.wait_idle(5000)
            with trace.open("a") as file:
                file.write(MARK)
            if engine:
                engine.close()


def counted(lines: Sequence[str]) -> dict[str, float]:
    """Calls per step between the marks, by the thread that called first after the first of them."""
    first, last = (index for index, line in enumerate(lines) if line + "\n" == MARK)
    calls = [line.split() for line in lines[first + 1 : last]]
    graph_thread = next(call[0] for call in calls if call[1] == "cudaGraphLaunch")
    kinds = Counter(KINDS[call[1]] for call in calls if call[0] == graph_thread and call[1] in KINDS)
    return {column: kinds[column] / N_COUNTED for column in COLUMNS}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.cuda_emulator.calls",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--arch", type=int, default=900, help="compute capability times 100 (default: 900)")
    parser.add_argument("--model", type=Path, default=ROOT / "pyspac" / "models" / "demo-moe.gguf")
    parser.add_argument("--form", choices=FORMS, help=argparse.SUPPRESS)
    parser.add_argument("--trace", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.form:
        decode(options.form, options.model, options.trace)
        return 0
    library = ROOT / "build" / "cuda-emulated" / str(options.arch) / "libggml-cuda.so"
    if not library.is_file():
        print(f"calls: there is no {library}: python -m tools.cuda_emulator --no-tests", file=sys.stderr)
        return 2
    print("| per step | " + " | ".join(COLUMNS) + " |\n" + "|---" * (1 + len(COLUMNS)) + "|")
    for form, name in FORMS.items():
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace"
            command = [sys.executable, "-m", "tools.cuda_emulator.calls", "--form", form]
            command += ["--trace", str(trace), "--model", str(options.model)]
            names = {"GGML_BACKEND_PATH": str(library), "CUDA_EMULATOR_TRACE": str(trace)}
            subprocess.run(command, env=os.environ | names, check=True, stderr=subprocess.DEVNULL)
            counts = counted(trace.read_text(encoding="utf-8").splitlines())
        print(f"| {name} | " + " | ".join(f"{counts[column]:g}" for column in COLUMNS) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
