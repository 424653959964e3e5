"""`pyspac demo`: the shipped models on a piece of Python code, split and stock; do they agree, how fast?"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from email import parser
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.table import Table

import pyspac
from pyspac.checks import check_int
from pyspac.commands import options as o
from pyspac.commands.common import check_json_target, error_console, reports_errors
from pyspac.commands.json_file import STDOUT, write_json
from pyspac.commands.machine import cpu_model
from pyspac.commands.own import open_server
from pyspac.commands.run import answer_shown
from pyspac.commands.server_options import own_options
from pyspac.engine.params import EngineParams
from pyspac.errors import EXIT_INTERRUPTED, ConfigError, ModelError, PyspacError
from pyspac.forward.options import CacheSize
from pyspac.server import log
from pyspac.server.options import ServeOptions
from pyspac.talk.answer import Answer
from pyspac.talk.interrupt import Interrupt
from pyspac.talk.report import device_text, print_table, run_dict
from pyspac.talk.turns import Speeds, compare, stock_and_own

MODELS: Final = Path(pyspac.__file__).parent / "models"
TARGET: Final = MODELS / "demo-moe.gguf"
DRAFT: Final = MODELS / "demo-draft.gguf"
N_PROMPT_LINES: Final = 60
N_TIMED: Final = 96  # tokens per round
N_ROUNDS: Final = 12

# a fixed number, so that both runs draft the same
DraftMax = Annotated[int, typer.Option("--draft-max", metavar="N", help="Tokens to draft per step.")]


@reports_errors
def demo(
    n_predict: o.NPredict = 128,
    cache: o.Cache = "25%",
    draft_max: DraftMax = 4,
    threads: o.Threads = None,
    json_file: o.JsonFile = None,
    verbose: o.Verbose = False,
) -> None:
    """Show the split at work, without a download.

    The shipped model continues a Python module: once with its experts split between an emulated device and
    the host, once in stock llama.cpp. Both draft alike, so the texts must be equal, else the exit code is 1.
    Then speeds: the defaults without a GPU beside llama.cpp's.
    """
    check_json_target(json_file)
    check_int("--draft-max", draft_max, 1, EngineParams().max_batch - 1)
    if CacheSize(text=cache).is_zero:
        raise ConfigError(
            "--cache", cache, "more than 0, such as 25%: the demo shows stock llama.cpp as well"
        )
    _check_models()
    log.set_up("demo", as_json=False, is_quiet=not verbose)
    passed = ["--temp", "0", *([] if threads is None else ["--threads", str(threads)])]
    drafts = {"model": TARGET, "model_draft": DRAFT, "draft_max": draft_max}
    options = own_options(drafts | {"device": "emulated", "cache": cache}, passed)
    split = _run_shown(options, "split", n_predict, json_file, verbose=verbose)
    plain = own_options(drafts | {"stock": True}, [*passed, "--no-repack"])
    stock = _run_shown(plain, "stock", n_predict, json_file, verbose=verbose)
    _show_verdict(split, stock)
    speeds = _compare_speeds(passed)
    _show_speeds(speeds)
    if json_file is not None:
        result = {"equal": _is_equal(split, stock), "split": split.report, "stock": stock.report}
        write_json(json_file, result | {"tps": {name: speeds.of(name).median for name in speeds.tps}})
    if not _is_equal(split, stock):
        raise PyspacError(
            "the split's text differs from stock's; please report this with the output of pyspac doctor"
        )


@dataclass(frozen=True, slots=True)
class _Shown:
    """One of the two runs, after it was shown."""

    answer: Answer
    report: dict[str, Any]
    device: str


def _check_models() -> None:
    for path in (TARGET, DRAFT):
        if not path.is_file():
            raise ModelError(
                f"{path}: the demo model is missing; install the package again, or take a whole checkout"
            )


def demo_prompt() -> str:
    """The beginning of a module of the standard library that the models were not trained on."""
    return "".join(inspect.getsource(parser).splitlines(keepends=True)[:N_PROMPT_LINES])


def _run_shown(
    options: ServeOptions, title: str, n_predict: int, json_file: str | None, *, verbose: bool
) -> _Shown:
    out = sys.stderr if json_file == STDOUT else sys.stdout
    console = error_console()
    console.print(f"\n[bold]{title}[/]\n")
    with Interrupt.watch() as interrupt, open_server(options, interrupt, verbose=verbose) as own:
        figures = own.figures()
        answer = answer_shown(own.client, demo_prompt(), interrupt, out, n_predict, figures)
        console.print()
        print_table(console, answer, own, figures)
        shown = _Shown(answer, run_dict(own, figures, answer), device_text(own))
    if answer.stop_reason == "interrupted":
        raise typer.Exit(EXIT_INTERRUPTED)
    return shown


def _is_equal(split: _Shown, stock: _Shown) -> bool:
    return split.answer.token_ids == stock.answer.token_ids


def _show_verdict(split: _Shown, stock: _Shown) -> None:
    experts, layers = split.report["experts"], split.report["layers"]
    n_asked = experts["n_hit"] + experts["n_miss"] + experts["n_late"]
    verdict = "equal, token for token" if _is_equal(split, stock) else "DIFFERENT"
    error_console().print(
        f"\nThe two texts are [bold]{verdict}[/].\n\n"
        f"What you saw: in each of {layers['split']} layers the router picks a few experts per token. "
        f"{experts['n_slots']} experts had a slot on the device, {split.device}. Of {n_asked} requests for "
        f"an expert {experts['n_hit']} found it there (one that several tokens of a step share counts once); "
        f"the others were computed on the host in the same step ({experts['n_steps_with_both']} forward "
        "passes used both sides). Meanwhile experts were copied in, guided by what the drafted tokens asked "
        "for. As both sides of this demo are the same CPU, it shows that the output stays the same, not a "
        "gain in speed.",
    )


def _compare_speeds(passed: list[str]) -> Speeds:
    """One token per step, without drafts: only the kernels."""
    options = own_options({"model": TARGET, "device": "none"}, passed)
    return compare(stock_and_own(options), demo_prompt(), N_ROUNDS, N_TIMED)


def _show_speeds(speeds: Speeds) -> None:
    names = {
        "stock": "llama.cpp, weights as in the file",
        "repacked": "llama.cpp, weights repacked (its default)",
        "pyspac": "pyspac run (--device none)",
    }
    table = Table(
        "without a GPU, one token per step", "tokens/s", "quartiles", box=None, padding=(0, 2, 0, 0)
    )
    for name, text in names.items():
        speed = speeds.of(name)
        table.add_row(text, f"{speed.median:.0f}", f"{speed.low:.0f} to {speed.high:.0f}")
    console = error_console()
    console.print(f"\nThe fast way on a machine without a GPU, {N_ROUNDS} rounds in turns:\n")
    console.print(table)
    ratio = speeds.ratio_to_best("pyspac").median
    larger = "; larger ones gain more" if ratio > 1 else ""
    console.print(
        f"\nIn the median round pyspac is {ratio:.2f} times as fast as the faster llama.cpp ({cpu_model()}). "
        f"This model is tiny{larger}."
    )
