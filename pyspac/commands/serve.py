"""`pyspac serve`: llama-server with the engine attached, and the scheduler beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pyspac.commands import options as o
from pyspac.commands.common import reports_errors
from pyspac.commands.grouped_help import MORE
from pyspac.commands.server_options import serve_options
from pyspac.scheduler.policy import DEFAULT_POLICY
from pyspac.server import log
from pyspac.server.keep import DEFAULT_MIB
from pyspac.server.options import DEFAULT_CPU_SHARE, DEFAULT_DRAIN_S, DEFAULT_HOST

Host = Annotated[
    str,
    typer.Option(
        "--host", metavar="HOST", envvar="LLAMA_ARG_HOST", show_envvar=False, help="Address to listen on."
    ),
]
Port = Annotated[
    int | None,
    typer.Option(
        "--port",
        metavar="N",
        envvar="LLAMA_ARG_PORT",
        show_envvar=False,
        help="Port; 0: any free one. Default: 8080.",
    ),
]
Board = Annotated[
    str | None,
    typer.Option(
        "--board",
        metavar="NAME",
        help="Name of the shared board. Default: server-PORT.",
        rich_help_panel=MORE,
    ),
]
MaxBatch = Annotated[
    int | None,
    typer.Option(
        "--max-batch",
        metavar="N",
        help="Widest batch to split. Default: server slots times (drafts + 1), of 8 drafts or more; with "
        "--mtp times (drafts + 1) squared.",
        rich_help_panel=MORE,
    ),
]
Restart = Annotated[bool, typer.Option("--restart", help="Restart llama-server if it dies.")]
Drain = Annotated[
    float,
    typer.Option(
        "--drain",
        metavar="S",
        envvar="PYSPAC_DRAIN",
        help="Seconds that running answers get after SIGTERM; /health says no at once, new requests "
        "are refused after 5 s.",
    ),
]

Keep = Annotated[
    Path | None,
    typer.Option(
        "--keep",
        metavar="DIR",
        help="Keep the states of prompts in this folder, for the next server with the same model and "
        "settings.",
    ),
]
KeepMib = Annotated[
    int | None,
    typer.Option(
        "--keep-mib",
        metavar="N",
        help=f"With --keep: MiB in all; what was used longest ago goes first. Default: {DEFAULT_MIB}.",
    ),
]


@reports_errors
def serve(
    context: typer.Context,
    model_word: o.ModelWord = None,
    model: o.Model = None,
    hf_repo: o.HfRepo = None,
    host: Host = DEFAULT_HOST,
    port: Port = None,
    ctx_size: o.CtxSize = None,
    model_draft: o.ModelDraft = None,
    hf_repo_draft: o.HfRepoDraft = None,
    mtp: o.Mtp = None,
    cache: o.Cache = "auto",
    ram: o.Ram = None,
    lossy: o.Lossy = None,
    max_kl: o.MaxKl = None,
    device: o.Device = "auto",
    rpc: o.Rpc = None,
    host_kernels: o.HostKernels = "auto",
    cpu_range: o.CpuRange = None,
    board: Board = None,
    max_batch: MaxBatch = None,
    restart: Restart = False,
    drain: Drain = DEFAULT_DRAIN_S,
    keep: Keep = None,
    keep_mib: KeepMib = None,
    spec_type: o.SpecTypeName = None,
    speculation: o.SpeculationName = None,
    draft_max: o.DraftMax = None,
    policy: o.Policy = DEFAULT_POLICY,
    predict: o.Predictors = o.DEFAULT_PREDICTORS,
    cpu_share: o.CpuShare = DEFAULT_CPU_SHARE,
    metrics_port: o.MetricsPort = None,
    metrics_host: o.MetricsHost = DEFAULT_HOST,
    warm_start: o.WarmStart = True,
    log_json: o.LogJson = False,
) -> None:
    """Serve a model at http://HOST:PORT, over OpenAI's and Anthropic's APIs.

    llama-server with the engine inside, and a scheduler beside it. Other flags go to llama-server: -np 8,
    --embeddings, --lora FILE ... Ctrl-C ends everything; SIGTERM lets running answers finish first.
    Example: pyspac serve MODEL.gguf --port 8000
    """
    log.set_up("serve", as_json=log_json)
    options = serve_options(context.params, context.args)
    from pyspac.server.supervisor import serve as run_server  # loads the engine

    if code := run_server(options):
        raise typer.Exit(code)
