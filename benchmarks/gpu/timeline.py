#!/usr/bin/env python3
"""Phase `timeline`: when device, host experts and copies were at work, and by how much they overlap.

    timeline.py ROWS.jsonl OUT.png      draws a row of an earlier run, where matplotlib was missing

Host clocks come from the engine. With the CPU as the device its part is the time between dispatch and
collect, in which the graph's thread computes it. With a GPU that time contains launches and waiting as well,
so kernels come from CUPTI, through PyTorch's profiler, where there is PyTorch.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
from settings import Settings

Interval = tuple[float, float]  # begin, end in microseconds
N_STEPS, N_SHOWN = 40, 1  # decoded, and at the end kept
WIDTH = 5
LANES = ("dispatch", "device", "kernel", "host", "collect", "copy")
COLOURS = dict(
    zip(LANES, ("tab:gray", "tab:cyan", "tab:blue", "tab:orange", "tab:red", "tab:green"), strict=True)
)
MARK = "pyspac-clock"


# ---- recording -----------------------------------------------------------------------------------


def run(s: Settings, model_path: str) -> dict[str, Any]:
    """One row with the spans of the last step, and a figure of them beside the rows."""
    from arms import Arm
    from bench import open_bench, say
    from visit import opened

    with contextlib.ExitStack() as stack:
        bench = open_bench(s, Path(model_path), stack, say)
        host_mode = "executor" if bench.device.is_cpu else "auto"  # in the graph there would be no dispatch
        arm = Arm(name="timeline", group="", what="", is_split=True, host_mode=host_mode)
        bench.n_threads = s.threads or psutil.cpu_count(logical=False) or 1
        context, split, _ = stack.enter_context(opened(bench, arm))
        spans, source = record(context, split, bench.prompt(), is_gpu=not bench.device.is_cpu)
        row = {
            "row": "timeline",
            "device": bench.device.name,
            "device_spans": source,
            "emulated": ["device emulated on the CPU"] if bench.device.is_cpu else [],
            "model": bench.path.name,
            "width": WIDTH,
            "n_threads": bench.n_threads,
            "overlap": overlap_share(spans),
            "spans": spans,
        }
    figure = s.out_folder(not bench.device.is_cpu) / f"timeline-{bench.device.name.lower()}.png"
    why = draw(row, figure)
    skipped = [["figure", why]] if why else []
    drawn = "" if why else f", {figure}"
    return {
        "result": f"host experts {row['overlap']:.0%} beside the device ({source}){drawn}",
        "rows": [row],
        "skipped": skipped,
    }


def record(
    context: Any, split: Any, prompt: list[int], is_gpu: bool
) -> tuple[list[tuple[str, int, float, float]], str]:
    """Spans (kind, layer, begin, end in us) of the last step, and where the device's come from."""
    from pyspac.engine.step import StepRecord

    def step(index: int) -> None:
        first = prompt[0] + index * WIDTH % 100
        context.decode(range(first, first + WIDTH), WIDTH)
        split.after_step(StepRecord(step=index, n_draft=WIDTH - 1, n_accepted=WIDTH - 1, n_tokens=WIDTH))

    context.decode(prompt, 1)
    split.after_prompt()
    for index in range(N_STEPS - N_SHOWN):
        step(index)
    split.engine.take_spans()
    with kernels_of(is_gpu) as kernels:
        for index in range(N_STEPS - N_SHOWN, N_STEPS):
            step(index)
    spans = [
        (span.kind, span.il, float(span.begin_us), float(span.end_us)) for span in split.engine.take_spans()
    ]
    if not spans:
        raise RuntimeError("the engine recorded nothing: no layer was dispatched to the executor")
    spans += [("kernel", -1, begin, end) for begin, end in kernels()]
    start = min(begin for _, _, begin, _ in spans)
    spans = [(kind, il, round(begin - start, 1), round(end - start, 1)) for kind, il, begin, end in spans]
    return spans, "CUPTI" if kernels() else "host clocks"


@contextlib.contextmanager
def kernels_of(is_gpu: bool) -> Iterator[Callable[[], list[Interval]]]:
    """After the block: its kernels, in microseconds of time.monotonic(); none without PyTorch."""
    found: list[Interval] = []
    try:
        if not is_gpu:
            raise ImportError
        import torch
        from torch.profiler import ProfilerActivity, profile, record_function
    except ImportError:
        yield lambda: found
        return
    torch.cuda.init()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        mark_us = time.monotonic_ns() / 1e3
        with record_function(MARK):
            pass
        yield lambda: found
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        found += kernels_of_trace(json.loads(path.read_text()), mark_us)


def kernels_of_trace(trace: dict[str, Any], mark_us: float) -> list[Interval]:
    """Kernels of a Chrome trace whose event MARK began at `mark_us`."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    shift = mark_us - next(float(event["ts"]) for event in events if event["name"] == MARK)
    kernels = [event for event in events if event.get("cat") == "kernel"]
    return [(float(e["ts"]) + shift, float(e["ts"]) + float(e["dur"]) + shift) for e in kernels]


# ---- figures -------------------------------------------------------------------------------------


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Without overlaps, in order."""
    out: list[Interval] = []
    for begin, end in sorted(intervals):
        if out and begin <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((begin, end))
    return out


def overlap_share(spans: list[tuple[str, int, float, float]]) -> float:
    """Share of the host experts' time in which the device was at work too; 0 without host experts."""

    def of(kind: str) -> list[Interval]:
        return merged((begin, end) for name, _, begin, end in spans if name == kind)

    host, device = of("host"), of("kernel") or of("device")
    both = sum(max(0.0, min(h[1], d[1]) - max(h[0], d[0])) for h in host for d in device)
    return both / sum(end - begin for begin, end in host) if host else 0.0


def draw(row: dict[str, Any], path: Path) -> str | None:
    """Write the figure; else return why not."""
    try:
        import matplotlib as mpl
    except ImportError:
        return "no matplotlib; draw the row elsewhere: timeline.py ROWS.jsonl OUT.png"
    mpl.use("Agg")
    from matplotlib import pyplot

    kinds = [kind for kind in LANES if any(span[0] == kind for span in row["spans"])]
    figure, axes = pyplot.subplots(figsize=(12, 1 + 0.4 * len(kinds)), layout="constrained")
    for lane, kind in enumerate(reversed(kinds)):
        bars = [(begin / 1e3, (end - begin) / 1e3) for name, _, begin, end in row["spans"] if name == kind]
        axes.broken_barh(bars, (lane - 0.4, 0.8), facecolors=COLOURS[kind])
    axes.set_yticks(range(len(kinds)), reversed(kinds))
    axes.set_xlabel("ms")
    notes = "; ".join([row["device"], *row["emulated"], f"device by {row['device_spans']}"])
    axes.set_title(
        f"one step of {row['width']} tokens ({notes}): {row['overlap']:.0%} of host experts overlap"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return None


def main(rows: str, figure: str) -> int:
    found = [json.loads(line) for line in Path(rows).read_text().splitlines()]
    timelines = [row for row in found if row["row"] == "timeline"]
    why = draw(timelines[-1], Path(figure)) if timelines else f"{rows}: no row of the phase `timeline`"
    if why:
        print(f"timeline.py: {why}", file=sys.stderr)
    return 2 if why else 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: timeline.py ROWS.jsonl OUT.png")
    sys.exit(main(*sys.argv[1:]))
