"""`pyspac attach`: a scheduler for a server that was started by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pyspac.commands.common import LinkGbS, reports_errors
from pyspac.commands.serve import (
    DEFAULT_ESTIMATOR,
    CpuShare,
    DraftMax,
    Estimator,
    LogJson,
    MetricsHost,
    MetricsPort,
    Speculation,
    Threshold,
    WarmStart,
    Without,
    choose_drafting,
    scheduler_config,
)
from pyspac.server import board_file, log
from pyspac.server.options import DEFAULT_CPU_SHARE, DEFAULT_HOST, AttachOptions


@reports_errors
def attach(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="The server's --spac-board. Default: the only one running."),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option("-m", "--model", metavar="FILE", help="The server's model, for the warm start."),
    ] = None,
    speculation: Speculation = None,
    draft_max: DraftMax = None,
    estimator: Estimator = DEFAULT_ESTIMATOR,
    threshold: Threshold = "auto",
    without: Without = "",
    link_gb_s: LinkGbS = None,
    cpu_share: CpuShare = DEFAULT_CPU_SHARE,
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = DEFAULT_HOST,
    warm_start: WarmStart = True,
    log_json: LogJson = False,
) -> None:
    """Run a scheduler for a server that was started by hand.

    That server is llama-server with --spac-cache SIZE and --spac-board NAME. Ends when the server does.
    Without a scheduler the server keeps the last decisions for 10 s of decoding; then the engine's own simple
    policy decides, and drafts have no limit. --draft-max is the server's own limit (0: it drafts nothing);
    unless --speculation is static, drafts of every kind are held below it.
    """
    log.set_up("attach", as_json=log_json)
    controller, n_draft_max = choose_drafting(speculation, draft_max, lowest=0)
    options = AttachOptions(
        scheduler=scheduler_config(estimator, threshold, without, link_gb_s, n_draft_max),
        metrics_port=metrics_port,
        metrics_host=metrics_host,
        cpu_share=cpu_share,
        speculation=controller,
        warm_start=warm_start,
        model=model,
        log_json=log_json,
    )
    from pyspac.server.attach import run_attached  # loads the engine

    run_attached(board_file.find_board(name), options)
