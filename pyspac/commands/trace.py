"""`pyspac trace`: record which experts a model's router selects, while it generates."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pyspac.commands.common import EXIT_INTERRUPTED, error_console, loading_bar, read_prompt, reports_errors
from pyspac.errors import ConfigError
from pyspac.generate.decode import Interrupt
from pyspac.generate.options import RunOptions, SpecType
from pyspac.generate.sampling import SamplingParams
from pyspac.lab.trace import TokenStatus, Trace
from pyspac.lab.trace_file import write_trace


@reports_errors
def trace(
    model: Annotated[Path, typer.Option("-m", "--model", metavar="FILE", help="The model, a GGUF file.")],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="The trace to write, Parquet.")
    ],
    model_draft: Annotated[
        Path | None,
        typer.Option(
            "-md", "--model-draft", metavar="FILE", help="Draft with this model; drafts are traced too."
        ),
    ] = None,
    prompt: Annotated[str | None, typer.Option("-p", "--prompt", metavar="TEXT", help="The prompt.")] = None,
    file: Annotated[
        Path | None, typer.Option("-f", "--file", metavar="FILE", help="A text file that holds the prompt.")
    ] = None,
    n_predict: Annotated[
        int, typer.Option("-n", "--predict", "--n-predict", metavar="N", help="Tokens to generate at most.")
    ] = 128,
    ctx_size: Annotated[
        int | None,
        typer.Option("-c", "--ctx-size", metavar="N", help="Context in tokens, as in `pyspac run`."),
    ] = None,
    threads: Annotated[int | None, typer.Option("-t", "--threads", metavar="N", help="CPU threads.")] = None,
    device: Annotated[
        str, typer.Option("-dev", "--device", metavar="NAME", help="auto, cpu, or a name such as CUDA0.")
    ] = "auto",
    spec_type: Annotated[
        str | None, typer.Option("--spec-type", metavar="draft|ngram|none", help="Who drafts.")
    ] = None,
    draft_max: Annotated[
        int | None, typer.Option("--draft-max", metavar="N", help="Tokens to draft per step.")
    ] = None,
    temp: Annotated[float, typer.Option("--temp", metavar="T", help="Temperature; 0: greedy.")] = 0.0,
    seed: Annotated[int, typer.Option("-s", "--seed", metavar="N", help="Of sampling; -1: random.")] = -1,
    logits: Annotated[
        bool,
        typer.Option("--logits", help="Record the router's scores of all experts, not only of the selected."),
    ] = False,
    early: Annotated[
        bool,
        typer.Option(
            "--early", help="Record each router applied one layer early: what a prefetcher could know."
        ),
    ] = False,
    no_display: Annotated[bool, typer.Option("--no-display", help="Do not show the text.")] = False,
) -> None:
    """Record a routing trace for `pyspac lab`.

    The model runs in stock llama.cpp, without a split. The trace holds step, position, whether a token was
    drafted, accepted or rejected, and per layer the experts with their router weights.
    """
    _check_output(output)
    options = RunOptions(
        model=model, draft=model_draft, n_predict=n_predict, n_ctx=ctx_size, n_threads=threads, device=device,
        stock=True, spec_type=_spec_type(spec_type), draft_max=draft_max,
        sampling=replace(SamplingParams(), temp=temp, seed=seed),
    )  # fmt: skip
    text = read_prompt(prompt, file)
    with Interrupt.watch() as interrupt:
        recorded = record(
            options, text, interrupt, wants_logits=logits, wants_early=early, is_shown=not no_display
        )
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
    is_shown: bool,
) -> Trace:
    """Load, generate with a progress bar, and return the trace."""
    from pyspac.lab.probe import RoutingProbe
    from pyspac.lab.recorder import TraceSession
    from pyspac.lab.trace_builder import trace_geometry

    trace_geometry(options.model)  # a dense model is refused before it is loaded
    probe = RoutingProbe(wants_logits=wants_logits, wants_early=wants_early)
    with loading_bar(interrupt) as progress:
        session = TraceSession(probe, options, progress)
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


def _check_output(path: Path) -> None:
    folder = path.resolve().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError("--output", str(path), "a file in a folder that exists and can be written to")


def _spec_type(name: str | None) -> SpecType | None:
    match name:
        case None | "draft" | "ngram" | "none":
            return name
    raise ConfigError("--spec-type", name, "draft, ngram, none")
