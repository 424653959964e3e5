"""`pyspac lab`: replay routing traces through caching, prefetching and routing policies."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from pyspac.checks import check_int
from pyspac.commands import lab_options as lo
from pyspac.commands import options as o
from pyspac.commands.common import check_json_target, check_target, error_console, reports_errors
from pyspac.commands.grouped_help import GroupedCommand
from pyspac.commands.json_file import STDOUT, write_json
from pyspac.commands.machine_speed import measure
from pyspac.commands.tier_view import disk_text
from pyspac.engine.cpus import default_n_threads
from pyspac.errors import ConfigError, UsageError
from pyspac.lab import report as reports
from pyspac.lab.combos import COMBINATIONS, DEFAULT_SWEEP, find_setup
from pyspac.lab.job import Job, Replay, run_job
from pyspac.lab.machine import PRESETS, Machine, disk_machine, load_machine
from pyspac.lab.policy import DIMENSIONS
from pyspac.lab.registry import find, load_file, names
from pyspac.lab.setup import Setup
from pyspac.lab.sweep import make_jobs, run_with_oracle
from pyspac.lab.trace import Trace
from pyspac.lab.trace_file import read_trace
from pyspac.lab.workload import DEFAULT_ACCEPT, Phase
from pyspac.model.checks import check_model_file
from pyspac.model.geometry import read_geometry
from pyspac.scheduler.config import NO_PREDICTOR, parse_ablations, parse_predictors

app = typer.Typer(
    name="lab",
    help="Replay recorded routing through policies of caching. Times are predicted.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

DEFAULTS = Setup()
DEFAULT_POLICIES = ",".join(DEFAULT_SWEEP)
DEFAULT_CAPACITIES = "1%,2.5%,5%,10%,17%,25%,40%,60%"


@app.command(cls=GroupedCommand)
@reports_errors
def run(
    trace: lo.TraceFile,
    policy: lo.Policy = None,
    eviction: lo.Eviction = DEFAULTS.eviction,
    prefetch: lo.Prefetch = DEFAULTS.prefetch,
    miss: lo.Miss = DEFAULTS.miss,
    routing: lo.Routing = DEFAULTS.routing,
    without: lo.Without = "",
    predict: o.Predictors = NO_PREDICTOR,  # a trace may not hold what the default needs
    capacity: lo.Capacity = DEFAULTS.capacity,
    per_layer: lo.PerLayer = False,
    k: lo.DraftLength = None,
    machine: lo.MachineName = "rtx4090",
    accept: lo.Accept = DEFAULT_ACCEPT,
    phase: lo.PhaseName = "decode",
    cold: lo.Cold = False,
    first: lo.First = None,
    accuracy: lo.Accuracy = DEFAULTS.predictor_accuracy,
    seed: lo.Seed = 0,
    oracle: lo.Oracle = True,
    policy_file: lo.PolicyFiles = None,
    json_file: o.JsonFile = None,
) -> None:
    """Run one set of policies over a trace and show its measures."""
    check_json_target(json_file)
    if cold and phase == "all":
        raise UsageError(
            "--cold keeps the prompt from the scheduler, --phase all makes it a step: give one of them"
        )
    if policy is not None and eviction != DEFAULTS.eviction:
        raise UsageError(f"--policy {policy} says what leaves: leave out --eviction {eviction}")
    _load_files(policy_file)
    base = Setup(
        eviction=eviction, prefetch=prefetch, miss=miss, routing=routing, capacity=capacity,
        without=parse_ablations(without), predict=parse_predictors(predict, "--predict"), per_layer=per_layer,
        is_cold=cold, n_first=first, predictor_accuracy=accuracy, seed=seed,
    )  # fmt: skip
    setup, forced_k = (base, None) if policy is None else find_setup(policy, base)
    replay = _replay(trace, k if forced_k is None else forced_k, accept, phase, seed)
    job = Job(replay, setup, _machine(machine))
    row = run_with_oracle([job], base, n_workers=1)[0] if oracle else run_job(job)
    if json_file is not None:
        write_json(json_file, row | {"setup": setup.to_dict(), "machine_model": job.machine.to_dict()})
    if json_file != STDOUT:
        output_console().print(reports.run_table(row))


@app.command("list", cls=GroupedCommand)
@reports_errors
def list_names(policy_file: lo.PolicyFiles = None, json_file: o.JsonFile = None) -> None:
    """List policies by dimension, named combinations and machines."""
    check_json_target(json_file)
    _load_files(policy_file)
    if json_file is not None:
        known: dict[str, Any] = {dimension: names(dimension) for dimension in DIMENSIONS}
        write_json(json_file, known | {"combinations": list(COMBINATIONS), "machines": list(PRESETS)})
    if json_file == STDOUT:
        return
    console = output_console()
    for dimension in DIMENSIONS:
        entries = {name: find(dimension, name).about() for name in names(dimension)}
        console.print(_name_table(dimension, entries))
    console.print(_name_table("combinations", {name: found.about for name, found in COMBINATIONS.items()}))
    speeds = {
        m.name: f"link {m.link_gb_s:g}, host {m.host_gb_s:g}, device {m.device_gb_s:g} GB/s"
        for m in PRESETS.values()
    }
    console.print(_name_table("machines", speeds))


@app.command(cls=GroupedCommand)
@reports_errors
def sweep(
    trace: lo.TraceFile,
    output: lo.Rows = None,
    policies: lo.Policies = DEFAULT_POLICIES,
    capacities: lo.Capacities = DEFAULT_CAPACITIES,
    k: lo.DraftLengths = None,
    machines: lo.MachineNames = "rtx4090",
    accept: lo.Accept = DEFAULT_ACCEPT,
    phase: lo.PhaseName = "decode",
    accuracy: lo.Accuracy = DEFAULTS.predictor_accuracy,
    seed: lo.Seed = 0,
    jobs: lo.Jobs = 0,
    dask: lo.Dask = None,
    policy_file: lo.PolicyFiles = None,
) -> None:
    """Run policies x capacities x draft lengths x machines in parallel."""
    check_int("--jobs", jobs, 0)
    if dask is not None and jobs:
        raise UsageError(f"--dask {dask} has workers of its own: leave --jobs {jobs} out")
    files = _load_files(policy_file)
    if output is not None:
        if output.suffix not in reports.FORMATS:
            raise ConfigError("--output", str(output), f"a name that ends in {' or '.join(reports.FORMATS)}")
        check_target("--output", output)
    lengths = [None] if k is None else [_whole("--k", part) for part in _parts(k)]
    base = Setup(predictor_accuracy=accuracy, seed=seed)
    replays = [_replay(trace, length, accept, phase, seed) for length in lengths]
    todo = make_jobs(replays, _parts(policies), _parts(capacities), map(_machine, _parts(machines)), base)
    if not todo:
        raise UsageError("there is nothing to run: give at least one policy, capacity and machine")
    with _progress() as bar:
        task = bar.add_task("runs", total=None)
        rows = run_with_oracle(
            todo, base, n_workers=jobs, policy_files=files, dask=dask,
            on_done=lambda done, total: bar.update(task, completed=done, total=total),
        )  # fmt: skip
    if output is not None:
        reports.write_rows(rows, output)
    output_console().print(reports.make_table(rows))


@app.command(cls=GroupedCommand)
@reports_errors
def report(results: lo.Results, folder: lo.Folder = None, json_file: o.JsonFile = None) -> None:
    """Show a sweep's results as a table; write CSV and figures."""
    check_json_target(json_file)
    rows = reports.read_rows(results)
    if folder is not None:
        if not folder.is_dir():
            raise ConfigError("--output", str(folder), "a folder that exists")
        from pyspac.lab.figures import draw_all

        reports.write_csv(rows, folder / f"{results.stem}.csv")
        for path in draw_all(rows, folder):
            error_console().print(f"wrote {path}")
    if json_file is not None:
        write_json(json_file, {"rows": rows})
    if json_file != STDOUT:
        output_console().print(reports.make_table(rows))


def output_console() -> Console:
    """Tables here are wide: at least 120 columns where stdout is no terminal."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def _replay(trace: Path, k: int | None, accept: float, phase: str, seed: int) -> Replay:
    """Check the trace, so that a bad file is reported before anything runs."""
    found: Trace = read_trace(trace)
    if phase not in ("decode", "all"):
        raise ConfigError("--phase", phase, "decode or all")
    checked: Phase = "all" if phase == "all" else "decode"
    if k is None and not found.has_drafts:
        k = 0
    return replace(Replay(source=str(trace)), k=k, accept=accept, phase=checked, seed=seed)


def _load_files(files: list[Path] | None) -> tuple[Path, ...]:
    for path in files or ():
        load_file(path)
    return tuple(files or ())


def _machine(text: str) -> Machine:
    """As `load_machine`; "disk=MODEL": measured now, of the disk that the model lies on, and of memory."""
    kind, _, path = text.partition("=")
    if kind != "disk" or not path:
        return load_machine(text)
    geometry = read_geometry(check_model_file(Path(path)))
    if not geometry.is_moe:
        raise ConfigError("--machine", text, "disk=MODEL with a model that has experts")
    here = measure(default_n_threads(), 0, 0, Path(path), (), geometry.matrix_bytes)
    if here.disk.slows_under_load:
        typer.echo(f"disk: {disk_text(here.disk)}", err=True)
    return disk_machine(here.disk, here.memory_gb_s)


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _whole(name: str, text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(name, text, "whole numbers with commas between them")
    return int(text)


def _name_table(title: str, entries: dict[str, str]) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0), title=f"\n{title}", title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, about in entries.items():
        table.add_row(name, about)
    return table


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=error_console(), transient=True)
