#!/usr/bin/env python3
"""What serving costs beside plain llama-server: servers that take turns, request by request.

    stock      llama-server of the same build without the engine, weights in the file's layout
    attached   engine, board and scheduler, nothing resident: the scheduler may not copy a byte
    split      engine, board and scheduler at 25 %
    alone      engine at 25 % without a scheduler: the built-in policy decides
    stopped    engine at 25 % with a scheduler that was stopped (SIGSTOP) once it had decided

Device is the CPU (emulated). A ratio is the median over rounds of (reference's time / this one's time in the
same round). With --check the exit code is 1 if attached/stock or stopped/alone is below 0.95.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

import machine

from pyspac._native import bin_dir
from pyspac.engine.board import Board
from pyspac.server.child import Child
from pyspac.server.health import is_healthy
from tools.served import HOST, free_port, post

MODELS = Path(__file__).resolve().parent.parent / "pyspac" / "models"
MIN_RATIO = 0.95
START_S = 60.0
PROMPTS = ("def parse(self, text):\n", "import os\nimport sys\n\n", "class Reader:\n    def __init__(self")

# a scheduler that decides every step but whose budget is no byte, so that nothing becomes resident
NO_COPIES = """
import sys
from pyspac.scheduler.config import SchedulerConfig
from pyspac.server.attach import run_attached
from pyspac.server.options import AttachOptions
run_attached(sys.argv[1], AttachOptions(scheduler=SchedulerConfig(byte_budget=0), warm_start=False))
"""


@dataclass(slots=True)
class Contender:
    """One server; `reference` is what it is compared with."""

    name: str
    reference: str | None
    port: int
    board: str | None = None
    ms_per_token: list[float] = field(default_factory=list)


# ---- the servers ---------------------------------------------------------------------------------


@contextlib.contextmanager
def process(name: str, argv: list[str]) -> Iterator[Child]:
    """A quiet child, ended at the end even if it is stopped; an engine in it has the emulated device."""
    with Path(os.devnull).open("wb") as nowhere:
        child = Child(
            name, argv, env={"PYSPAC_DEVICE": "emulated"}, death_signal=signal.SIGKILL,
            stdout=nowhere, stderr=nowhere,
        )  # fmt: skip
    try:
        yield child
    finally:
        child.send(signal.SIGCONT)
        child.stop(30)


def start_server(stack: contextlib.ExitStack, args: argparse.Namespace, cache: str | None, name: str) -> int:
    """llama-server, with the engine if there is a cache; its port."""
    port = free_port()
    argv = [str(bin_dir() / "llama-server"), "-m", str(args.model), "--host", HOST, "--port", str(port)]
    argv += ["--device", "none", "-np", "1", "-t", str(args.threads), "--no-repack", "--no-warmup"]
    if args.draft:
        argv += ["-md", str(args.draft), "--spec-type", "draft-simple", "-td", str(args.threads)]
    if cache:
        argv += ["--spac-cache", cache, "--spac-board", name]
    server = stack.enter_context(process("llama-server", argv))
    wait(lambda: is_healthy(HOST, port) or server.exit_code() is not None)
    if server.exit_code() is not None:
        raise RuntimeError(f"{server.end_text()}: {' '.join(argv)}")
    return port


def wait(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + START_S
    while not condition():
        if time.monotonic() > end_s:
            raise RuntimeError(f"waited {START_S:.0f} s in vain")
        time.sleep(0.05)


def start_scheduler(stack: contextlib.ExitStack, board: str, may_copy: bool) -> Child:
    """As `pyspac attach`; returns after its first decision."""
    attach = ["-m", "pyspac", "attach", "--no-warm-start", "--speculation", "static"]
    command = attach if may_copy else ["-c", NO_COPIES]
    with Board.open(board) as shared:
        before = int(shared.counters["n_decisions"][0])
        scheduler = stack.enter_context(process("scheduler", [sys.executable, *command, board]))
        wait(lambda: int(shared.counters["n_decisions"][0]) > before or scheduler.exit_code() is not None)
    if scheduler.exit_code() is not None:
        raise RuntimeError(scheduler.end_text())
    return scheduler


def start_all(stack: contextlib.ExitStack, args: argparse.Namespace) -> list[Contender]:
    """All servers, warmed up, in the order in which they take turns."""
    contenders = [Contender("stock", None, start_server(stack, args, None, ""))]
    for name, reference in (
        ("attached", "stock"),
        ("split", "stock"),
        ("alone", "stock"),
        ("stopped", "alone"),
    ):
        board = f"bench-{name}-{os.getpid()}"
        contender = Contender(name, reference, start_server(stack, args, args.cache, board), board)
        scheduler = None if name == "alone" else start_scheduler(stack, board, may_copy=name != "attached")
        for prompt in PROMPTS:
            ms_per_token(contender, args.n_predict, prompt)
        if name == "stopped":
            assert scheduler is not None
            scheduler.send(signal.SIGSTOP)
        contenders.append(contender)
    return contenders


# ---- measuring -----------------------------------------------------------------------------------


def ms_per_token(contender: Contender, n_predict: int, prompt: str) -> float:
    """One greedy answer, by the server's own clock, the prompt left out."""
    body = {
        "prompt": prompt,
        "n_predict": n_predict,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": False,
    }
    return float(post(contender.port, "/completion", body)["timings"]["predicted_per_token_ms"])


def measure(contenders: list[Contender], args: argparse.Namespace) -> None:
    """Every round asks every server the same; the order turns, so that none always follows the same one."""
    for index in range(args.rounds):
        first = index % len(contenders)
        for contender in contenders[first:] + contenders[:first]:
            prompt = PROMPTS[index % len(PROMPTS)]
            contender.ms_per_token.append(ms_per_token(contender, args.n_predict, prompt))


def row(contender: Contender, reference: Contender | None) -> dict[str, object]:
    """Medians and the spread of the ratios; what the board counted."""
    result: dict[str, object] = {
        "name": contender.name,
        "tokens_per_s": round(1e3 / median(contender.ms_per_token), 1),
        "reference": contender.reference,
    }
    if reference is not None:
        ratios = [a / b for a, b in zip(reference.ms_per_token, contender.ms_per_token, strict=True)]
        low, _, high = quantiles(ratios, n=4)
        result |= {"ratio": round(median(ratios), 3), "quartiles": [round(low, 3), round(high, 3)]}
    if contender.board is not None:
        with Board.open(contender.board) as board:
            counters = board.counters[0]
            rows = [int(counters[name]) for name in ("n_hit_rows", "n_miss_rows", "n_late_rows")]
            result |= {"covered": round(rows[0] / max(1, sum(rows)), 3), "n_loads": int(counters["n_loads"])}
    return result


def show(rows: list[dict[str, object]]) -> None:
    print(f"{'':10} {'tokens/s':>9} {'ratio':>7} {'quartiles':>16} {'to':>9} {'covered':>8} {'loads':>7}")
    for r in rows:
        ratio, spread = r.get("ratio", ""), "{} .. {}".format(*r["quartiles"]) if "quartiles" in r else ""  # type: ignore[misc]
        print(
            f"{r['name']:10} {r['tokens_per_s']:>9} {ratio:>7} {spread:>16} {r['reference'] or '':>9} "
            f"{r.get('covered', ''):>8} {r.get('n_loads', ''):>7}"
        )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=MODELS / "demo-moe.gguf")
    parser.add_argument("--draft", type=Path, default=MODELS / "demo-draft.gguf", help="'' for none")
    parser.add_argument("--cache", default="25%")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--n-predict", type=int, default=128)
    parser.add_argument("--threads", type=int, default=machine.describe()["n_cores"])
    parser.add_argument("--json", type=Path, metavar="FILE", help="append one line of JSON")
    parser.add_argument("--check", action="store_true", help=f"exit with 1 below {MIN_RATIO}")
    args = parser.parse_args()
    args.draft = args.draft if str(args.draft) not in ("", ".") else None
    return args


def main() -> int:
    args = parse_args()
    about = machine.describe()
    with contextlib.ExitStack() as stack:
        contenders = start_all(stack, args)
        measure(contenders, args)
        by_name = {contender.name: contender for contender in contenders}
        rows = [row(c, by_name[c.reference] if c.reference else None) for c in contenders]
    print(machine.one_line(about))
    print(f"{args.model.name}, {args.threads} threads, device CPU (emulated), {args.rounds} rounds\n")
    show(rows)
    if args.json:
        with args.json.open("a") as file:
            file.write(
                json.dumps({"benchmark": "server", "machine": about, "threads": args.threads, "rows": rows})
                + "\n"
            )
    ratios = {str(r["name"]): float(str(r.get("ratio", 1))) for r in rows}
    return int(args.check and min(ratios["attached"], ratios["stopped"]) < MIN_RATIO)


if __name__ == "__main__":
    raise SystemExit(main())
