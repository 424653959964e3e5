"""`pyspac attach`: a scheduler for a server that was started by hand."""

from __future__ import annotations

from typing import Annotated

import typer

from pyspac.commands import options as o
from pyspac.commands.common import reports_errors
from pyspac.engine.ahead import check_not_in_engine
from pyspac.errors import UsageError
from pyspac.scheduler.baseline import VARIABLE
from pyspac.scheduler.config import parse_predictors
from pyspac.scheduler.policy import DEFAULT_POLICY, Policy
from pyspac.server import board_file, log
from pyspac.server.options import (
    DEFAULT_CPU_SHARE,
    DEFAULT_HOST,
    AttachOptions,
    choose_drafting,
)
from pyspac.server.settings import read_settings

Name = Annotated[
    str | None,
    typer.Argument(metavar="NAME", help="The server's --spac-board. Default: the only one running."),
]
Settings = Annotated[
    str | None,
    typer.Option(
        "--settings",
        metavar="FILE",
        hidden=True,
        help="All settings as JSON, of `pyspac serve`; - for stdin.",
    ),
]


@reports_errors
def attach(
    name: Name = None,
    model: o.Model = None,
    speculation: o.SpeculationName = None,
    draft_max: o.DraftMax = None,
    policy: o.Policy = DEFAULT_POLICY,
    predict: o.AttachPredictors = o.DEFAULT_PREDICTORS,
    cpu_share: o.CpuShare = DEFAULT_CPU_SHARE,
    metrics_port: o.MetricsPort = None,
    metrics_host: o.MetricsHost = DEFAULT_HOST,
    warm_start: o.WarmStart = True,
    log_json: o.LogJson = False,
    settings: Settings = None,
) -> None:
    """Run a scheduler for a server that was started by hand.

    That server is llama-server with --spac-cache SIZE and --spac-board NAME. Ends when the server does.
    --draft-max is the server's own limit (0: it drafts nothing); unless --speculation is static, drafts stay
    below it. -m, the server's model, is for the warm start.
    """
    if settings is not None:
        options = read_settings(settings)
    else:
        controller, n_draft_max = choose_drafting(speculation, draft_max, lowest=0)
        options = AttachOptions(
            scheduler=Policy.read(policy).with_drafts(n_draft_max, parse_predictors(predict, "--predict")),
            metrics_port=metrics_port, metrics_host=metrics_host, cpu_share=cpu_share,
            speculation=controller, warm_start=warm_start, model=model, log_json=log_json,
        )  # fmt: skip
        check_not_in_engine(options.scheduler.predict)
        if options.scheduler.baseline is not None:
            raise UsageError(
                f"--policy {policy} is the engine's part: leave it out, and start that server with "
                f"{VARIABLE}={options.scheduler.baseline}"
            )
    log.set_up("attach", as_json=options.log_json)
    from pyspac.server.attach import run_attached  # loads the engine

    run_attached(board_file.find_board(name), options)
