"""`pyspac trace`: record which experts a model's router selects, while it generates."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pyspac.commands import options as o
from pyspac.commands.common import (
    EXIT_INTERRUPTED,
    check_target,
    error_console,
    loading_bar,
    read_prompt,
)
from pyspac.commands.stuck import computes
from pyspac.errors import UsageError
from pyspac.generate.decode import Interrupt
from pyspac.generate.options import RunOptions
from pyspac.generate.sampling import SamplingParams
from pyspac.lab.trace import TokenStatus, Trace
from pyspac.lab.trace_file import write_trace
from pyspac.model.spec_types import DRAFT, parse_spec_type
from pyspac.model.tensor_split import parse_tensor_split
from pyspac.speculation.manager import FIXED

Output = Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The trace to write, Parquet.")]
Logits = Annotated[
    bool,
    typer.Option("--logits", help="Record the router's scores of all experts, not of the chosen ones alone."),
]
Early = Annotated[
    bool,
    typer.Option(
        "--early", help="Record each router applied 1, 2 and 3 layers early: what a prefetcher could know."
    ),
]
DraftGate = Annotated[
    bool,
    typer.Option(
        "--draft-gate",
        help="Record the target's routers on the draft model's router inputs; the draft is a MoE as wide.",
    ),
]
NoDisplay = Annotated[bool, typer.Option("--no-display", help="Do not show the text.")]


@computes
def trace(
    model: o.Model,
    output: Output,
    model_draft: o.ModelDraft = None,
    mtp: o.Mtp = None,
    prompt: o.Prompt = None,
    file: o.PromptFile = None,
    n_predict: o.NPredict = 128,
    ctx_size: o.CtxSize = None,
    threads: o.Threads = None,
    device: o.Device = "auto",
    tensor_split: o.TensorSplit = "",
    spec_type: o.SpecTypeName = None,
    draft_max: o.DraftMax = None,
    temp: o.Temp = 0.0,
    seed: o.Seed = -1,
    logits: Logits = False,
    early: Early = False,
    draft_gate: DraftGate = False,
    no_display: NoDisplay = False,
) -> None:
    """Record a routing trace for `pyspac lab`.

    The model runs in stock llama.cpp, without a split; drafts are traced too. The trace holds step, position,
    its id, whether a token was drafted, accepted or rejected, and per layer the experts with their router
    weights.
    """
    check_target("--output", output)
    kind = parse_spec_type(spec_type)
    drafts = (model_draft or mtp) is not None if kind is None else kind != "none"
    options = RunOptions(
        model=model, draft=model_draft, mtp=mtp, n_predict=n_predict, n_ctx=ctx_size, n_threads=threads,
        device=device, tensor_split=parse_tensor_split(tensor_split), stock=True,
        spec_type=kind, draft_max=draft_max,
        speculation=FIXED if drafts else None,  # a trace does not depend on how long recording takes
        sampling=replace(SamplingParams(), temp=temp, seed=seed),
    )  # fmt: skip
    text = read_prompt(prompt, file)
    with Interrupt.watch() as interrupt:
        recorded = record(
            options, text, interrupt, wants_logits=logits, wants_early=early, wants_gate=draft_gate,
            is_shown=not no_display,
        )  # fmt: skip
    write_trace(recorded, output)
    _say(recorded, output)
    if interrupt:
        raise typer.Exit(EXIT_INTERRUPTED)


def record(
    options: RunOptions,
    prompt: str,
    interrupt: Interrupt,
    *,
    wants_logits: bool,
    wants_early: bool,
    wants_gate: bool,
    is_shown: bool,
) -> Trace:
    """Load, generate with a progress bar, and return the trace."""
    from pyspac.lab.probe import RoutingProbe
    from pyspac.lab.recorder import TraceSession, check_draft_gate
    from pyspac.lab.trace_builder import trace_geometry

    trace_geometry(options.model)  # a dense model is refused before it is loaded
    if wants_gate:
        check_draft_gate(options.model, options.draft)
        if options.effective_spec_type != DRAFT:
            raise UsageError(
                f"--draft-gate records what the draft model of --spec-type {DRAFT} sees: choose that one"
            )
    probe = RoutingProbe(wants_logits=wants_logits, wants_early=wants_early, keeps_inputs=wants_gate)
    draft_probe = (
        RoutingProbe(wants_logits=False, wants_early=False, keeps_inputs=True) if wants_gate else None
    )
    with loading_bar(interrupt) as progress:
        session = TraceSession(probe, draft_probe, options, progress)
    columns = (TextColumn("tokens"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with session, Progress(*columns, console=error_console(), transient=True) as bar:
        task = bar.add_task("tokens", total=options.n_predict if options.n_predict > 0 else None)
        stream = session.text_stream()

        def on_token(token: int) -> None:
            bar.advance(task)
            if is_shown:
                sys.stdout.write(stream.feed(token))
                sys.stdout.flush()

        session.generate(session.tokenize(prompt), on_token, interrupt)
        if is_shown:
            sys.stdout.write(stream.finish() + "\n")
        return session.trace()


def _say(trace: Trace, path: Path) -> None:
    count = {status: int((trace.status == status).sum()) for status in TokenStatus}
    error_console().print(
        f"wrote {path}: {count[TokenStatus.PROMPT]} prompt tokens, "
        f"{count[TokenStatus.SAMPLED] + count[TokenStatus.ACCEPTED]} decoded, of which "
        f"{count[TokenStatus.ACCEPTED]} drafted; {count[TokenStatus.REJECTED]} rejected"
    )
