"""`pyspac bench`: llama.cpp and pyspac on the user's own machine and model, in turns."""

from __future__ import annotations

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
from pyspac.commands.bench_ways import PROMPTS, find_ways, fit_together
from pyspac.commands.common import (
    check_json_target,
    check_target,
    error_console,
    output_console,
)
from pyspac.commands.json_file import STDOUT, write_json
from pyspac.commands.model_names import find_files
from pyspac.commands.stuck import computes
from pyspac.errors import ConfigError, UsageError
from pyspac.generate.compare import take_turns
from pyspac.generate.draft_files import spec_type_of
from pyspac.generate.loading import Loading
from pyspac.generate.memory_tier import given_ram
from pyspac.generate.options import CacheSize, RunOptions
from pyspac.generate.tensor_split import parse_tensor_split
from pyspac.model.checks import check_model_file
from pyspac.model.gguf_header import read_header

NPredict = Annotated[
    int, typer.Option("-n", "--n-predict", metavar="N", help="Tokens to generate per prompt; 2 or more.")
]
Save = Annotated[
    bool,
    typer.Option(
        "--profile",
        help="Save the fastest way as this model's defaults, for pyspac run and pyspac chat, if it wins each "
        f"of {MIN_ROUNDS} rounds or more; flags that are given there, --stock among them, replace it.",
    ),
]
Forget = Annotated[
    bool,
    typer.Option(
        "--forget", help="Forget the defaults that --profile saved for this model, and measure nothing."
    ),
]


@computes
def bench(
    model: o.ModelIfAny = None,
    hf_repo: o.HfRepo = None,
    model_draft: o.ModelDraft = None,
    hf_repo_draft: o.HfRepoDraft = None,
    mtp: o.Mtp = None,
    n_predict: NPredict = 64,
    rounds: o.Rounds = 5,
    ctx_size: o.CtxSize = None,
    threads: o.Threads = None,
    cache: o.Cache = "auto",
    ram: o.Ram = None,
    device: o.Device = "auto",
    rpc: o.Rpc = None,
    tensor_split: o.TensorSplit = "",
    json_file: o.JsonFile = None,
    png: o.Png = None,
    profile: Save = False,
    forget: Forget = False,
    verbose: o.Verbose = False,
) -> None:
    """Compare pyspac with llama.cpp on this machine and model.

    llama.cpp with repacked weights (its default), with weights as in the file, and with a GPU with as many
    experts there as fit into the memory that pyspac would use; pyspac; and both with drafts. They take turns
    on four kinds of prompts, a few minutes in all. Says who wins, and with which flags.
    """
    if forget:
        target, _ = find_files(model, hf_repo)
        output_console().print(
            saved_defaults.forget(check_model_file(target).path), markup=False, soft_wrap=True
        )
        return
    check_int("-n", n_predict, 2)
    check_int("--rounds", rounds, 2)
    check_json_target(json_file)
    if png is not None:
        check_target("--png", png)
        check_can_draw()
    if profile:
        _check_can_save(rounds, has_places=bool(rpc or tensor_split))
    target, draft = find_files(model, hf_repo, model_draft, hf_repo_draft)
    spec_type = None if draft is None else spec_type_of(read_header(draft))
    options = RunOptions(
        model=target, draft=draft, spec_type=spec_type,
        n_predict=n_predict, n_ctx=ctx_size, n_threads=threads,
        cache=CacheSize(text=cache), ram=given_ram(ram), device=device, rpc=rpc,
        tensor_split=parse_tensor_split(tensor_split), verbose=verbose,
    )  # fmt: skip
    findings = measure(options, mtp, rounds)
    console = error_console() if json_file == STDOUT else output_console()
    show(console, findings)
    if json_file is not None:
        write_json(json_file, findings.row())
    if png is not None:
        draw(findings, png)
        console.print(f"figure: {png}", markup=False, soft_wrap=True)
    if profile:
        console.print(_save(findings), markup=False, soft_wrap=True)


def _check_can_save(n_rounds: int, *, has_places: bool) -> None:
    """Raises PyspacError, before anything is measured. `has_places`: servers or shares were given."""
    if n_rounds < MIN_ROUNDS:
        raise ConfigError("--rounds", n_rounds, f"{MIN_ROUNDS} or more with --profile")
    if has_places:
        raise UsageError("--profile keeps neither servers nor shares: leave it out, or --rpc and -ts")
    saved_defaults.check_can_save()


def _save(findings: Findings) -> str:
    """The winner as the model's defaults, if it has proved itself; what to say of that."""
    if why := findings.why_not_saved():
        before = saved_defaults.find(findings.options.model)
        stay = f"; what was saved before stays: {before['flags']} (pyspac bench --forget)" if before else ""
        return f"nothing was saved: {why}{stay}"
    way = findings.ways[findings.winner]
    path = saved_defaults.save(way.options, way.flags)
    return f"saved as this model's defaults: {way.flags} ({path}); pyspac bench --forget forgets them"


def measure(options: RunOptions, mtp: Path | None, n_rounds: int) -> Findings:
    """Every way, on every prompt, `n_rounds` times. `mtp`: an adapter, for a way of its own."""
    about = machine.describe()  # the load is that of others as long as nothing runs
    loading = Loading.of(options)
    if mtp is not None:  # refused now rather than in its turn
        Loading.of(replace(options, draft=None, spec_type=None, mtp=mtp))
    ways = find_ways(options, loading, mtp)
    at_once = fit_together(ways, loading)
    runs = {name: way.options for name, way in ways.items()}
    with _progress_bar(len(ways) * len(PROMPTS) * (1 + n_rounds)) as on_turn:
        turns = take_turns(runs, PROMPTS, n_rounds, on_turn, at_once=at_once)
    return Findings(options, ways, turns, at_once, about)


@contextmanager
def _progress_bar(n_turns: int) -> Iterator[Callable[[], None]]:
    """On stderr; what it yields is called after each turn."""
    console = error_console()
    columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=n_turns)
        yield lambda: bar.advance(task)
