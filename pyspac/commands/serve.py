"""`pyspac serve`: llama-server with the engine attached, and the scheduler beside it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from pyspac.commands import options as o
from pyspac.commands.common import reports_errors
from pyspac.commands.grouped_help import GroupedCommand
from pyspac.commands.llama_flags import check_short_options, find_flag, flags_with_value
from pyspac.commands.model_names import hub_arguments
from pyspac.errors import UsageError
from pyspac.generate.memory_tier import given_ram
from pyspac.generate.options import CacheSize
from pyspac.generate.spec_types import parse_spec_type
from pyspac.server import log
from pyspac.server.options import (
    DEFAULT_CPU_SHARE,
    DEFAULT_DRAIN_S,
    DEFAULT_HOST,
    AttachOptions,
    ServeOptions,
    drafting_of,
    names_draft,
    scheduler_config,
)

Host = Annotated[str, typer.Option("--host", metavar="HOST", help="Address to listen on.")]
Port = Annotated[
    int | None,
    typer.Option(
        "--port", metavar="N", help="Port to listen on. Default: 8080, or a free one if it is taken."
    ),
]
Board = Annotated[
    str | None,
    typer.Option("--board", metavar="NAME", help="Name of the shared board. Default: server-PORT."),
]
MaxBatch = Annotated[
    int | None,
    typer.Option(
        "--max-batch",
        metavar="N",
        help="Widest batch that is split: server slots times (drafts + 1), with --mtp its square. Default: "
        "40; with --mtp what that takes.",
    ),
]
Restart = Annotated[
    bool, typer.Option("--restart", help="Start llama-server again if it dies, instead of ending.")
]
Drain = Annotated[
    float,
    typer.Option(
        "--drain",
        metavar="S",
        envvar="PYSPAC_DRAIN",
        help="After SIGTERM: seconds for answers under way; /health says no, later new requests are refused.",
    ),
]


class ServeCommand(GroupedCommand):
    """Says where options of llama-server belong."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As Typer; an option that is not known is named as it was given."""
        given = list(args)
        known = {name for parameter in self.params for name in parameter.opts}
        if found := find_flag("serve", args, known, flags_with_value(self.params)):
            raise _say_refused(found[0])
        check_short_options(args, self.params)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            # by its name: the class is click's or Typer's own, by Typer's version
            if type(error).__name__ != "NoSuchOption":
                raise
            letter = getattr(error, "option_name", "")  # of -np the first
            option = next((text for text in given if text.startswith(letter)), letter)
            raise _say_refused(option) from error


def _say_refused(option: str) -> typer.Exit:
    """Say it; the exit to raise."""
    typer.echo(
        f"pyspac: error: serve has no option {option} (`pyspac serve -h` lists them); if it is one of "
        f"llama-server, give it at the end, after --: pyspac serve ... -- {option} ...",
        err=True,
    )
    return typer.Exit(UsageError.exit_code)


@reports_errors
def serve(
    context: typer.Context,
    model: o.ModelIfAny = None,
    hf_repo: o.HfRepo = None,
    model_draft: o.ModelDraft = None,
    hf_repo_draft: o.HfRepoDraft = None,
    mtp: o.Mtp = None,
    cache: o.Cache = "auto",
    ram: o.Ram = None,
    device: o.Device = "auto",
    rpc: o.Rpc = None,
    host_kernels: o.HostKernels = "auto",
    cpu_range: o.CpuRange = None,
    ctx_size: o.CtxSize = None,
    host: Host = DEFAULT_HOST,
    port: Port = None,
    board: Board = None,
    max_batch: MaxBatch = None,
    restart: Restart = False,
    drain: Drain = DEFAULT_DRAIN_S,
    spec_type: o.SpecTypeName = None,
    speculation: o.SpeculationName = None,
    draft_max: o.DraftMax = None,
    estimator: o.Estimator = o.DEFAULT_ESTIMATOR,
    threshold: o.Threshold = "auto",
    without: o.Without = "",
    predict: o.Predictors = o.DEFAULT_PREDICTORS,
    link_gb_s: o.LinkGbS = None,
    cpu_share: o.CpuShare = DEFAULT_CPU_SHARE,
    metrics_port: o.MetricsPort = None,
    metrics_host: o.MetricsHost = DEFAULT_HOST,
    warm_start: o.WarmStart = True,
    log_json: o.LogJson = False,
) -> None:
    """Serve a model: llama-server with its experts split.

    The scheduler runs beside it. It speaks OpenAI's API at http://HOST:PORT/v1; arguments after -- are for
    llama-server. --speculation steers every drafter; one that is named after -- alone keeps llama-server's
    lengths without it. Ctrl-C ends everything, SIGTERM lets answers under way finish first.
    """
    log.set_up("serve", as_json=log_json)
    passed = (*context.args, *hub_arguments(hf_repo, hf_repo_draft))
    has_draft = model_draft is not None or mtp is not None or names_draft(passed)
    kind = parse_spec_type(spec_type)
    controller, n_draft_max = drafting_of(kind, passed, speculation, draft_max, has_draft=has_draft)
    attach = AttachOptions(
        scheduler=scheduler_config(estimator, threshold, without, predict, link_gb_s, n_draft_max),
        metrics_port=metrics_port, metrics_host=metrics_host, cpu_share=cpu_share,
        speculation=controller, warm_start=warm_start, log_json=log_json,
    )  # fmt: skip
    options = ServeOptions(
        model=model, draft=model_draft, mtp=mtp, spec_type=kind, cache=CacheSize(text=cache), rpc=rpc,
        ram=given_ram(ram), device=device, host_kernels=host_kernels, cpu_range=cpu_range, n_ctx=ctx_size,
        host=host, port=port, board=board, max_batch=max_batch, restart=restart, drain_s=drain,
        passed=passed, attach=attach)  # fmt: skip
    from pyspac.server.supervisor import serve as run_server  # loads the engine

    if code := run_server(options):
        raise typer.Exit(code)
