"""`pyspac serve`: llama-server with the engine attached, and the scheduler beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from pyspac.commands.common import LinkGbS, reports_errors
from pyspac.errors import ConfigError
from pyspac.generate.options import (
    DEFAULT_DRAFT_CAP,
    DEFAULT_DRAFT_MAX,
    CacheSize,
    check_link_gb_s,
    choose_draft_max,
)
from pyspac.scheduler.config import ABLATIONS, DRAFT_MAX, ESTIMATORS, SchedulerConfig, parse_ablations
from pyspac.server import log
from pyspac.server.memory import DEFAULT_N_CTX
from pyspac.server.options import (
    DEFAULT_CPU_SHARE,
    DEFAULT_HOST,
    DEFAULT_MAX_BATCH,
    AttachOptions,
    ServeOptions,
    names_draft,
)
from pyspac.speculation.manager import CONTROLLERS, FIXED, choose_controller

Estimator = Annotated[
    str, typer.Option("--estimator", metavar="NAME", help=f"Of expected demand: {', '.join(ESTIMATORS)}.")
]
Threshold = Annotated[
    str,
    typer.Option("--threshold", metavar="auto|N", help="Utility from which an expert belongs on the device."),
]
Without = Annotated[
    str,
    typer.Option(
        "--without", metavar="LIST", help=f"Leave parts out, to measure them: {','.join(ABLATIONS)}."
    ),
]
MetricsPort = Annotated[
    int | None,
    typer.Option(
        "--metrics-port",
        metavar="N",
        help="Serve the scheduler's Prometheus metrics there; 0: any free port.",
    ),
]
MetricsHost = Annotated[str, typer.Option("--metrics-host", metavar="HOST", help="Where the metrics listen.")]
Speculation = Annotated[
    str | None,
    typer.Option(
        "--speculation",
        metavar="NAME",
        help=f"How long a draft model drafts: {', '.join(CONTROLLERS)}, or auto (the best of these): "
        "static always as long, the others as long as it pays. Default: auto; static with --draft-max. "
        "What drafts without a draft model keeps llama-server's own lengths.",
    ),
]
DraftMax = Annotated[
    int | None,
    typer.Option(
        "--draft-max",
        metavar="N",
        help=f"Tokens to draft per step at most. Default: {DEFAULT_DRAFT_MAX}; {DEFAULT_DRAFT_CAP} where "
        "--speculation decides.",
    ),
]
CpuShare = Annotated[
    float, typer.Option("--cpu-share", metavar="X", help="Share of one core that the scheduler may take.")
]
WarmStart = Annotated[
    bool,
    typer.Option(
        "--warm-start/--no-warm-start", help="Load what the last run learned, save it at the end; or neither."
    ),
]
LogJson = Annotated[
    bool, typer.Option("--log-json", help="Log as JSON on stdout; llama-server's own log stays on stderr.")
]

DEFAULT_ESTIMATOR: Final = SchedulerConfig().estimator

HELP: Final = """Serve a model: llama-server with its experts split, and the scheduler in a process beside it.

Speaks OpenAI's API at http://HOST:PORT/v1 and has llama-server's own pages and endpoints. Arguments after --
go to llama-server as they are. Ctrl-C or SIGTERM ends everything.
"""


@reports_errors
def serve(
    context: typer.Context,
    model: Annotated[
        Path | None, typer.Option("-m", "--model", metavar="FILE", help="The model, a GGUF file.")
    ] = None,
    model_draft: Annotated[
        Path | None,
        typer.Option("-md", "--model-draft", metavar="FILE", help="A small model that drafts tokens."),
    ] = None,
    cache: Annotated[
        str,
        typer.Option(
            "--cache",
            metavar="SIZE",
            help="Device memory for experts: a share of all (25%), a number of MiB, or auto (what is free).",
        ),
    ] = "auto",
    device: Annotated[
        str,
        typer.Option(
            "-dev",
            "--device",
            metavar="NAME",
            help="auto (the first GPU, else the CPU), cpu (an emulated device), none (every expert on the "
            "host, with the engine's own kernels; no --cache, no scheduler), or a name such as CUDA0.",
        ),
    ] = "auto",
    host_kernels: Annotated[
        str,
        typer.Option(
            "--host-kernels",
            metavar="NAME",
            help="Who computes the host's experts: spac (the engine's own kernels), ggml (bit for bit as "
            "llama.cpp), or auto (ggml where the device is the CPU, else spac).",
        ),
    ] = "auto",
    cpu_range: Annotated[
        str | None,
        typer.Option(
            "-Cr",
            "--cpu-range",
            metavar="LO-HI",
            help="Cores for llama-server, such as 0-7; the engine's own threads for the host's "
            "experts are pinned, each to one of them. Default: all.",
        ),
    ] = None,
    ctx_size: Annotated[
        int | None,
        typer.Option(
            "-c",
            "--ctx-size",
            metavar="N",
            help=f"Context in tokens over all server slots; 0: the model's own. "
            f"Default: the model's own, at most {DEFAULT_N_CTX}.",
        ),
    ] = None,
    host: Annotated[str, typer.Option("--host", metavar="HOST", help="Address to listen on.")] = DEFAULT_HOST,
    port: Annotated[
        int | None,
        typer.Option(
            "--port", metavar="N", help="Port to listen on. Default: 8080, or a free one if it is taken."
        ),
    ] = None,
    board: Annotated[
        str | None,
        typer.Option("--board", metavar="NAME", help="Name of the shared board. Default: server-PORT."),
    ] = None,
    max_batch: Annotated[
        int,
        typer.Option(
            "--max-batch", metavar="N", help="Widest batch that is split: server slots times (drafts + 1)."
        ),
    ] = DEFAULT_MAX_BATCH,
    restart: Annotated[
        bool, typer.Option("--restart", help="Start llama-server again if it dies, instead of ending.")
    ] = False,
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
    log.set_up("serve", as_json=log_json)
    if model_draft is None and not names_draft(context.args):
        check_nothing_drafts(speculation, draft_max)
        controller, n_draft_max = FIXED, 0
    else:
        controller, n_draft_max = choose_drafting(speculation, draft_max)
    attach = AttachOptions(
        scheduler=scheduler_config(estimator, threshold, without, link_gb_s, n_draft_max),
        metrics_port=metrics_port,
        metrics_host=metrics_host,
        cpu_share=cpu_share,
        speculation=controller,
        warm_start=warm_start,
        log_json=log_json,
    )
    options = ServeOptions(
        model=model,
        draft=model_draft,
        cache=CacheSize(text=cache),
        device=device,
        host_kernels=host_kernels,
        cpu_range=cpu_range,
        n_ctx=ctx_size,
        host=host,
        port=port,
        board=board,
        max_batch=max_batch,
        restart=restart,
        passed=tuple(context.args),
        attach=attach,
    )
    from pyspac.server.supervisor import serve as run_server

    if code := run_server(options):
        raise typer.Exit(code)


serve.__doc__ = HELP


def choose_drafting(speculation: str | None, draft_max: int | None, *, lowest: int = 1) -> tuple[str, int]:
    """Who decides how long to draft, and the limit, `lowest` or more. Raises ConfigError."""
    if draft_max is not None and not lowest <= draft_max <= DRAFT_MAX:
        raise ConfigError("--draft-max", draft_max, f"{lowest} .. {DRAFT_MAX}")
    controller = choose_controller(speculation, draft_max)
    return controller, choose_draft_max(draft_max, controller)


def check_nothing_drafts(speculation: str | None, draft_max: int | None) -> None:
    """Raise ConfigError for what only a draft model could carry out."""
    allowed = (
        "only with a draft model, -md FILE (or -- -hfd USER/MODEL); what drafts without one "
        "(-- --spec-type ngram-mod, draft-mtp, ...) keeps llama-server's own lengths"
    )
    for flag, value in (("--speculation", speculation), ("--draft-max", draft_max)):
        if value is not None:
            raise ConfigError(flag, value, allowed)


def scheduler_config(
    estimator: str, threshold: str, without: str, link_gb_s: float | None, n_draft_max: int
) -> SchedulerConfig:
    """The settings that `serve` and `attach` share. Raises ConfigError."""
    if threshold != "auto" and not threshold.isdecimal():
        raise ConfigError("--threshold", threshold, "auto, or a whole number from 1")
    check_link_gb_s(link_gb_s)
    return SchedulerConfig(
        estimator=estimator,
        threshold="auto" if threshold == "auto" else int(threshold),
        without=parse_ablations(without),
        n_draft_max=n_draft_max,
        link_gb_s=link_gb_s,
    )
