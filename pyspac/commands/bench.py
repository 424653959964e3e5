"""`pyspac bench`: llama.cpp and pyspac on the user's own machine and model, in turns."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pyspac.checks import check_int
from pyspac.commands import machine, saved_defaults
from pyspac.commands import options as o
from pyspac.commands.bench_report import MIN_ROUNDS, Findings, check_can_draw, draw, show
from pyspac.commands.bench_ways import PROMPTS, Given, find_ways, fit_together
from pyspac.commands.common import (
    check_json_target,
    check_png,
    check_target,
    error_console,
    output_console,
    reports_errors,
)
from pyspac.commands.community import SUFFIX, markdown_path, write_report
from pyspac.commands.json_file import STDOUT, write_json
from pyspac.commands.model_names import find_files
from pyspac.errors import ConfigError, UsageError
from pyspac.forward.preflight import choose_n_ctx
from pyspac.model.checks import check_model_file
from pyspac.model.draft_files import spec_type_of
from pyspac.model.geometry import read_geometry
from pyspac.model.gguf_header import read_header
from pyspac.server import log
from pyspac.server.options import MAX_TOKENS
from pyspac.talk.turns import take_turns

NPredict = Annotated[
    int, typer.Option("-n", "--n-predict", metavar="N", help="Tokens to generate per prompt; 2 or more.")
]
Save = Annotated[
    bool,
    typer.Option(
        "--profile",
        help="Save the fastest way as this model's defaults for pyspac run and chat, if it wins "
        f"each of {MIN_ROUNDS} rounds or more; flags given there replace it.",
    ),
]
Report = Annotated[
    Path | None,
    typer.Option(
        "--report",
        metavar="NAME.json",
        help="Write machine, model and speeds to NAME.json, to share (benchmarks/community/), and "
        "a table to NAME.md.",
    ),
]
Forget = Annotated[
    bool,
    typer.Option("--forget", help="Only forget what --profile saved for this model."),
]


@reports_errors
def bench(
    command: typer.Context,
    model_word: o.ModelWord = None,
    model: o.Model = None,
    hf_repo: o.HfRepo = None,
    model_draft: o.ModelDraft = None,
    hf_repo_draft: o.HfRepoDraft = None,
    mtp: o.Mtp = None,
    n_predict: NPredict = 64,
    rounds: o.Rounds = 5,
    ctx_size: o.CtxSize = None,
    cache: o.Cache = "auto",
    ram: o.Ram = None,
    device: o.Device = "auto",
    rpc: o.Rpc = None,
    json_file: o.JsonFile = None,
    png: o.Png = None,
    report: Report = None,
    profile: Save = False,
    forget: Forget = False,
    verbose: o.Verbose = False,
) -> None:
    """Compare pyspac with llama.cpp on this machine and model.

    llama.cpp with repacked weights (its default), with weights as in the file, and on a GPU with as many
    experts as fit into pyspac's share of memory; pyspac; both with drafts. They take turns on four kinds of
    prompts for a few minutes. Says which is fastest, and with which flags.
    """
    if forget:
        target, _ = find_files(model, hf_repo, passed=command.args)
        output_console().print(saved_defaults.forget(target), markup=False, soft_wrap=True)
        return
    check_int("-n", n_predict, 2, MAX_TOKENS)
    check_int("--rounds", rounds, 2)
    check_json_target(json_file)
    check_png(png)
    if png is not None:
        check_can_draw()
    if report is not None:
        _check_report(report)
    if profile:
        _check_can_save(rounds, has_more=bool(rpc or command.args))
    log.set_up("bench", as_json=False, is_quiet=not verbose)
    target, draft = find_files(model, hf_repo, model_draft, hf_repo_draft, command.args)
    given = Given(
        model=target,
        common=shlex.join([*_context(target, ctx_size), *command.args]),
        split=shlex.join([*_flag("--device", device), *_flag("--rpc", rpc), *_flag("--cache", cache)]),
        ram=shlex.join(_flag("--ram", ram)),
        drafting=_drafting(draft),
        mtp=mtp.absolute() if mtp else None,
    )
    findings = measure(given, n_predict, rounds)
    _report(findings, json_file, png, saves=profile)
    if report is not None:
        write_report(report, findings)


def _report(findings: Findings, json_file: str | None, png: Path | None, *, saves: bool) -> None:
    console = error_console() if json_file == STDOUT else output_console()
    show(console, findings)
    if json_file is not None:
        write_json(json_file, findings.row())
    if png is not None:
        draw(findings, png)
        console.print(f"figure: {png}", markup=False, soft_wrap=True)
    if saves:
        console.print(_save(findings), markup=False, soft_wrap=True)


def _check_report(path: Path) -> None:
    if path.suffix != SUFFIX:
        raise ConfigError("--report", str(path), f"a name that ends in {SUFFIX}")
    for target in (path, markdown_path(path)):
        check_target("--report", target)


def _check_can_save(n_rounds: int, *, has_more: bool) -> None:
    """Raises PyspacError, before anything is measured. `has_more`: RPC servers, or flags of llama-server."""
    if n_rounds < MIN_ROUNDS:
        raise ConfigError("--rounds", n_rounds, f"{MIN_ROUNDS} or more with --profile")
    if has_more:
        raise UsageError("--profile keeps neither --rpc nor flags of llama-server: leave them out, or it")
    saved_defaults.check_can_save()


def _save(findings: Findings) -> str:
    """The winner as the model's defaults, if it has proved itself; what to say of that."""
    if why := findings.why_not_saved():
        before = saved_defaults.find(findings.given.model)
        stay = f"; what was saved before stays: {before} (pyspac bench --forget)" if before else ""
        return f"nothing was saved: {why}{stay}"
    way = findings.ways[findings.winner]
    path = saved_defaults.save(findings.given.model, way.flags)
    return f"saved as this model's defaults: {way.flags} ({path}); pyspac bench --forget forgets them"


def _drafting(draft: Path | None) -> str:
    """By a draft model or head, or from the text so far."""
    if draft is None:
        return "--spec-type ngram"
    kind = spec_type_of(read_header(draft))
    return shlex.join(["-md", str(draft.absolute()), *_flag("--spec-type", kind)])


def _flag(name: str, value: object) -> list[str]:
    return [] if value is None else [name, str(value)]


def _context(model: Path, n_ctx: int | None) -> list[str]:
    """Prompts are short; as large as for a server, the ways' contexts would not fit beside each other."""
    return _flag("-c", choose_n_ctx(n_ctx, read_geometry(check_model_file(model))))


def measure(given: Given, n_predict: int, n_rounds: int) -> Findings:
    """Every way, on every prompt, `n_rounds` times."""
    from pyspac.server.plan import plan_launch  # loads the engine

    about = machine.describe()  # the load is that of others as long as nothing runs
    geometry = read_geometry(check_model_file(given.model))
    options = replace(given.way(given.split, given.ram, is_own=True).options, socket=Path("bench.sock"))
    plan = plan_launch(replace(options, board=f"bench-{os.getpid()}"), is_stopped=lambda: False)
    ways = find_ways(given, plan, geometry)
    at_once = fit_together(ways, plan, geometry)
    runs = {name: way.options for name, way in ways.items()}
    with _progress_bar(len(ways) * len(PROMPTS) * (1 + n_rounds)) as on_turn:
        turns = take_turns(runs, PROMPTS, n_rounds, n_predict, on_turn, at_once=at_once)
    return Findings(given, ways, turns, at_once, about)


@contextmanager
def _progress_bar(n_turns: int) -> Iterator[Callable[[], None]]:
    """On stderr; what it yields is called after each turn."""
    console = error_console()
    columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=n_turns)
        yield lambda: bar.advance(task)
