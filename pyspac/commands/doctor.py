"""`pyspac doctor`: devices, memory, bandwidth, versions, what is wrong and how to mend it."""

from __future__ import annotations

from typing import Annotated, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pyspac.checks import check_int
from pyspac.commands import options as o
from pyspac.commands.common import check_json_target, output_console
from pyspac.commands.demo import TARGET
from pyspac.commands.doctor_checks import Finding, examine, has_problem, to_dict
from pyspac.commands.json_file import STDOUT, write_json
from pyspac.commands.model_names import find_files
from pyspac.commands.stuck import computes
from pyspac.engine.cpus import default_n_threads
from pyspac.engine.rpc_servers import places_of
from pyspac.model.checks import check_model_file

EXIT_PROBLEM: Final = 1
Rpc = Annotated[
    str | None,
    typer.Option(
        "--rpc", metavar="HOST:PORT", help="Look at a ggml-rpc-server and its devices; several with commas."
    ),
]
STYLES: Final = {"ok": "green", "note": "yellow", "problem": "red"}


@computes
def doctor(
    model_word: o.ModelWord = None,
    model: o.Model = None,
    hf_repo: o.HfRepo = None,
    threads: o.Threads = None,
    rpc: Rpc = None,
    json_file: o.JsonFile = None,
) -> None:
    """Check this machine, and say what is wrong.

    Devices, memory, the engine's kernels, measured speed of host memory (with --threads), link and disk,
    versions of the libraries; how to fix what is wrong. The exit code is 1 if there is a problem.
    """
    check_json_target(json_file)
    if threads is not None:
        check_int("-t", threads, 1)
    servers = [] if rpc is None else list(places_of(rpc).values())
    is_given = model is not None or hf_repo is not None
    path = check_model_file(find_files(model, hf_repo)[0]).path if is_given else TARGET
    findings = examine(threads or default_n_threads(), path, servers)
    if json_file is not None:
        write_json(json_file, to_dict(findings))
    if json_file != STDOUT:
        _show(output_console(), findings)
    if has_problem(findings):
        raise typer.Exit(EXIT_PROBLEM)


def _show(console: Console, findings: list[Finding]) -> None:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        mend = f"\n-> {finding.mend}" if finding.mend else ""
        level = f"[{STYLES[finding.level]}]{finding.level}[/]"
        table.add_row(level, escape(finding.what), escape(finding.detail + mend))
    console.print(table)
