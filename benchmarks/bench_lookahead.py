#!/usr/bin/env python3
"""What is known before it happens: seeded starts, and predictors.

Starts: llama-server with the engine and a scheduler, four prompts of different kinds, 16 tokens each.

    seeded   as shipped: prompts count, and fill free slots
    cold     `--policy "without=['prompt']"`, the engine's fills off

Each way answers the prompts in four fresh servers, and one after the other in one server. Predictors:
`pyspac run` on the same prompts, once per predictor. All take turns, round by round. The device is the CPU
(emulated). Coverage is the share of activations whose expert was on the device, drafted tokens and the
prompt's last one (in its last layer) included; a ratio is the median over rounds of what was measured in the
same round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any, Final

import machine
from bench_server import MODELS, process, wait

from pyspac._native import bin_dir
from pyspac.engine.ahead import DRAFT_GATE
from pyspac.engine.board import Board
from pyspac.scheduler.config import PREDICTORS
from pyspac.server.health import is_healthy
from tools.served import HOST, free_port, post

N_FIRST: Final = 16
WAYS: Final = ("seeded", "cold")
PLACES: Final = ("fresh", "one server")
PUBLISHED_S: Final = 0.1  # the engine writes the shared board every 25 ms while it is idle

PROMPTS: Final = {
    "a class": '''class Reader:
    """Reads lines from a file, one at a time, and counts them."""

    def __init__(self, path, encoding="utf-8"):
        self.path = path
        self.encoding = encoding
        self.count = 0
        self._file = open(path, encoding=encoding)

    def close(self):
        self._file.close()

    def readline(self):
''',
    "imports": """import argparse
import collections
import contextlib
import functools
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
""",
    "prose": """Return a new list that holds the items of the iterable in ascending order. The sort is
stable: if two items compare equal, their order in the result is that of the input. The key function is called
once for each item, and its value is kept for the whole of the sort. If an exception is raised while two items
are compared, the sort ends and the list may be left in a state that is partly changed. The arguments are
""",
    "data": """ERRORS = {
    100: ('Continue', 'Request received, please continue'),
    101: ('Switching Protocols', 'Switching to new protocol; obey Upgrade header'),
    200: ('OK', 'Request fulfilled, document follows'),
    201: ('Created', 'Document created, URL follows'),
    202: ('Accepted', 'Request accepted, processing continues off-line'),
    204: ('No Content', 'Request fulfilled, nothing follows'),
    206:
""",
}


# ---- starts --------------------------------------------------------------------------------------


class Server:
    """A llama-server with an engine and a scheduler beside it, which has decided once."""

    def __init__(self, stack: contextlib.ExitStack, args: argparse.Namespace, way: str) -> None:
        """Start both; they end with the stack. RuntimeError if one of them ends by itself."""
        self.port = free_port()
        board = f"bench-lookahead-{os.getpid()}-{self.port}"
        is_cold = way == "cold"
        argv = [str(bin_dir() / "llama-server"), "-m", str(args.model), "--host", HOST]
        argv += ["--port", str(self.port), "--device", "none", "-np", "1", "-t", str(args.threads)]
        argv += ["--no-repack", "--no-warmup", "--spac-cache", args.cache, "--spac-board", board]
        if args.draft:
            argv += ["-md", str(args.draft), "--spec-type", "draft-simple", "--spec-draft-n-max", "4"]
        with set_in_environment("PYSPAC_FILL", "0" if is_cold else "1"):
            server = stack.enter_context(process("llama-server", argv))
        wait(lambda: is_healthy(HOST, self.port) or server.exit_code() is not None)
        self.board = stack.enter_context(Board.open(board))
        attach = ["-m", "pyspac", "attach", "--no-warm-start", "--speculation", "static"]
        attach += ["--policy", "without=['prompt']"] if is_cold else []
        scheduler = stack.enter_context(process("scheduler", [sys.executable, *attach, board]))
        wait(lambda: int(self.board.counters["n_decisions"][0]) > 0 or scheduler.exit_code() is not None)
        for child in (server, scheduler):
            if child.exit_code() is not None:
                raise RuntimeError(child.end_text())

    def ask(self, prompt: str) -> dict[str, float]:
        """Return coverage of the answer's N_FIRST tokens, and milliseconds until the first."""
        body = {"prompt": prompt, "n_predict": N_FIRST, "temperature": 0, "ignore_eos": True,
                "cache_prompt": False}  # fmt: skip
        before = self._rows()
        timings = post(self.port, "/completion", body)["timings"]
        time.sleep(PUBLISHED_S)
        hit, total = (after - was for after, was in zip(self._rows(), before, strict=True))
        return {"coverage": hit / max(total, 1), "ttft_ms": float(timings["prompt_ms"])}

    def _rows(self) -> tuple[int, int]:
        """Activations that found their expert on the device, and all."""
        rows = [int(self.board.counters[name][0]) for name in ("n_hit_rows", "n_miss_rows", "n_late_rows")]
        return rows[0], sum(rows)


@contextlib.contextmanager
def set_in_environment(name: str, value: str) -> Any:
    """For children that start inside."""
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def measure_starts(args: argparse.Namespace, round_: int) -> list[dict[str, Any]]:
    """Every way and place once, the ways in turn first."""
    rows = []
    for way in WAYS if round_ % 2 == 0 else WAYS[::-1]:
        for kind, prompt in PROMPTS.items():
            with contextlib.ExitStack() as stack:
                found = Server(stack, args, way).ask(prompt)
            rows.append({"round": round_, "way": way, "place": "fresh", "prompt": kind} | found)
        with contextlib.ExitStack() as stack:
            server = Server(stack, args, way)
            for kind, prompt in PROMPTS.items():
                row = {"round": round_, "way": way, "place": "one server", "prompt": kind}
                rows.append(row | server.ask(prompt))
    return rows


def sum_up_starts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per place and prompt: medians, and the ratio seeded / cold over rounds; "all": the prompts' mean."""
    of = {(r["round"], r["way"], r["place"], r["prompt"]): r for r in rows}
    rounds = sorted({r["round"] for r in rows})
    result = []
    for place in PLACES:
        for kinds in (*([kind] for kind in PROMPTS), list(PROMPTS)):
            summary: dict[str, Any] = {"place": place, "prompt": kinds[0] if len(kinds) == 1 else "all"}
            for name in ("coverage", "ttft_ms"):
                by_way = {
                    way: [sum(of[r, way, place, kind][name] for kind in kinds) / len(kinds) for r in rounds]
                    for way in WAYS
                }
                ratios = [a / max(b, 1e-9) for a, b in zip(by_way["seeded"], by_way["cold"], strict=True)]
                summary |= {f"{name}_{way}": round(median(values), 4) for way, values in by_way.items()}
                summary[f"{name}_ratio"] = round(median(ratios), 3)
                summary[f"{name}_ratio_spread"] = [round(min(ratios), 3), round(max(ratios), 3)]
            result.append(summary)
    return result


# ---- predictors ----------------------------------------------------------------------------------


def contenders(args: argparse.Namespace, folder: Path) -> dict[str, tuple[str, Path | None]]:
    """Label: predictor and draft model. The gate's draft is the model in fewer bits, beside none with it."""
    found = {name: (name, args.draft) for name in args.predict if name != DRAFT_GATE}
    if DRAFT_GATE in args.predict:
        draft = folder / "low-bit.gguf"
        quantize = [str(bin_dir() / "llama-quantize"), "--allow-requantize", str(args.model), str(draft)]
        subprocess.run([*quantize, "Q4_0"], check=True, capture_output=True, timeout=300)
        found |= {"none, low-bit draft": ("none", draft), DRAFT_GATE: (DRAFT_GATE, draft)}
    return found


def run_once(args: argparse.Namespace, predictor: str, draft: Path | None, prompt: str) -> dict[str, Any]:
    """One `pyspac run` in a process of its own; what its --json says."""
    argv = [sys.executable, "-m", "pyspac", "run", "-m", str(args.model), "--device", "cpu", "-p", prompt]
    argv += ["--cache", args.cache, "-n", str(args.n_predict), "-t", str(args.threads), "--temp", "0"]
    argv += ["--predict", predictor, "--json", "-"]
    if draft:
        argv += ["-md", str(draft), "--draft-max", "4"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return dict(json.loads(done.stdout))


def measure_predictors(
    args: argparse.Namespace, ways: dict[str, tuple[str, Path | None]], round_: int
) -> list[dict[str, Any]]:
    """Every predictor on every prompt once; who goes first changes."""
    labels = list(ways)
    first = round_ % len(labels)
    rows = []
    for kind, prompt in PROMPTS.items():
        for label in labels[first:] + labels[:first]:
            found = run_once(args, *ways[label], prompt)
            experts = found["experts"]
            n_asked = sum(experts[field] for field in ("n_hit", "n_miss", "n_late"))
            row: dict[str, Any] = {"round": round_, "name": label, "prompt": kind, "tps": found["tps"]}
            row |= {"expert_coverage": experts["n_hit"] / max(n_asked, 1), "copies": experts["n_loads"]}
            said = found["predictors"][0] if found["predictors"] else {}
            for field in ("recall", "precision", "known", "n_copied", "n_copies_used", "us_per_step"):
                row[field] = said.get(field)
            if said.get("us_per_layer"):  # of one that asks routers
                row["us_per_step"] = said["us"] / max(found["n_steps"], 1)
            rows.append(row)
    return rows


def sum_up_predictors(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians over rounds and prompts, with the least and the most; None where nothing was said."""
    by_name: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_name[row["name"]].append(row)
    result = []
    for name, of_name in by_name.items():
        summary: dict[str, Any] = {"name": name}
        for field in of_name[0].keys() - {"name", "round", "prompt"}:
            values = [row[field] for row in of_name if row[field] is not None]
            summary[field] = round(median(values), 4) if values else None
            summary[f"{field}_spread"] = [round(min(values), 4), round(max(values), 4)] if values else None
        result.append(summary)
    return result


# ---- the command ---------------------------------------------------------------------------------


def show(starts: list[dict[str, Any]], predictors: list[dict[str, Any]]) -> None:
    print(f"{'start':11} {'prompt':8} {'seeded':>7} {'cold':>6} {'ratio':>6} {'first token: ratio':>19}")
    for r in starts:
        spread = "{} .. {}".format(*r["ttft_ms_ratio_spread"])
        print(
            f"{r['place']:11} {r['prompt']:8} {r['coverage_seeded']:7.3f} {r['coverage_cold']:6.3f} "
            f"{r['coverage_ratio']:6.2f} {r['ttft_ms_ratio']:7.3f} ({spread})"
        )
    print()
    columns = ("recall", "precision", "known", "expert_coverage", "copies", "n_copied", "n_copies_used",
               "us_per_step", "tps")  # fmt: skip
    print(f"{'predictor':20} " + " ".join(f"{name:>15}" for name in columns))
    for r in predictors:
        cells = ("-" if r[name] is None else f"{r[name]:.4g}" for name in columns)
        print(f"{r['name']:20} " + " ".join(f"{cell:>15}" for cell in cells))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=MODELS / "demo-moe.gguf")
    parser.add_argument("--draft", type=Path, default=MODELS / "demo-draft.gguf", help="'' for none")
    parser.add_argument("--cache", default="25%")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--n-predict", type=int, default=128, help="tokens per prompt, of predictors")
    parser.add_argument("--predict", default=",".join(("none", *PREDICTORS)), help="predictors to compare")
    # one core is left for copies, which a real device makes by itself
    parser.add_argument("--threads", type=int, default=max(1, int(str(machine.describe()["n_cores"])) - 1))
    parser.add_argument("--json", metavar="FILE", help="append one line of JSON; - for stdout, and no table")
    args = parser.parse_args()
    args.draft = args.draft if str(args.draft) not in ("", ".") else None
    args.predict = [name.strip() for name in args.predict.split(",") if name.strip()]
    return args


def main() -> int:
    args = parse_args()
    about = machine.describe()
    starts: list[dict[str, Any]] = []
    predictors: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        ways = contenders(args, Path(folder))
        for round_ in range(args.rounds):
            starts += measure_starts(args, round_)
            predictors += measure_predictors(args, ways, round_)
    result = {"starts": sum_up_starts(starts), "predictors": sum_up_predictors(predictors)}
    line = json.dumps(
        {"benchmark": "lookahead", "machine": about, "model": args.model.name, "cache": args.cache,
         "device": "CPU (emulated)", "threads": args.threads, "n_rounds": args.rounds, **result}
    )  # fmt: skip
    if args.json == "-":
        print(line)
        return 0
    print(machine.one_line(about))
    print(f"{args.model.name}, {args.cache}, {args.threads} threads, CPU (emulated), {args.rounds} rounds\n")
    show(**result)
    if args.json:
        with Path(args.json).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
