"""`pyspac run`: generate text after a prompt, split or stock."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, TextIO

import typer

from pyspac.commands.common import (
    EXIT_INTERRUPTED,
    LinkGbS,
    check_json_target,
    error_console,
    loading_bar,
    read_prompt,
    reports_errors,
)
from pyspac.commands.json_file import STDOUT, write_json
from pyspac.errors import ConfigError
from pyspac.generate.decode import Generation, Interrupt
from pyspac.generate.options import (
    DEFAULT_DRAFT_CAP,
    DEFAULT_DRAFT_MAX,
    DEFAULT_N_CTX,
    CacheSize,
    RunOptions,
    SpecType,
)
from pyspac.generate.report import print_table, run_dict
from pyspac.generate.sampling import SamplingParams
from pyspac.generate.session import Session
from pyspac.scheduler.config import ABLATIONS, ESTIMATORS, SchedulerConfig, parse_ablations
from pyspac.speculation.explain import explain as explain_lines
from pyspac.speculation.manager import CONTROLLERS


@reports_errors
def run(
    model: Annotated[Path, typer.Option("-m", "--model", metavar="FILE", help="The model, a GGUF file.")],
    model_draft: Annotated[
        Path | None,
        typer.Option(
            "-md",
            "--model-draft",
            metavar="FILE",
            help="A small model of the same family that drafts tokens.",
        ),
    ] = None,
    prompt: Annotated[str | None, typer.Option("-p", "--prompt", metavar="TEXT", help="The prompt.")] = None,
    file: Annotated[
        Path | None, typer.Option("-f", "--file", metavar="FILE", help="A text file that holds the prompt.")
    ] = None,
    n_predict: Annotated[
        int,
        typer.Option(
            "-n", "--predict", "--n-predict", metavar="N", help="Tokens to generate; -1: until the end token."
        ),
    ] = -1,
    ctx_size: Annotated[
        int | None,
        typer.Option(
            "-c",
            "--ctx-size",
            metavar="N",
            help=f"Context in tokens; 0: the model's own. Default: the model's own, at most {DEFAULT_N_CTX}.",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            "-t",
            "--threads",
            metavar="N",
            help="CPU threads. Default: one per physical core, at most one per core of --cpu-range.",
        ),
    ] = None,
    cpu_range: Annotated[
        str | None,
        typer.Option(
            "-Cr",
            "--cpu-range",
            metavar="LO-HI",
            help="Cores to stay on, such as 0-7; the engine's own threads for the host's experts are pinned, "
            "each to one of them. Default: all.",
        ),
    ] = None,
    gpu_layers: Annotated[
        int | None,
        typer.Option(
            "-ngl",
            "--gpu-layers",
            "--n-gpu-layers",
            metavar="N",
            help="Layers on the device, without their experts. Default: all; none if it is the CPU.",
        ),
    ] = None,
    temp: Annotated[
        float, typer.Option("--temp", metavar="T", help="Temperature; 0: greedy.")
    ] = SamplingParams().temp,
    top_k: Annotated[
        int, typer.Option("--top-k", metavar="N", help="Sample among the N best; 0: all.")
    ] = SamplingParams().top_k,
    top_p: Annotated[
        float,
        typer.Option("--top-p", metavar="P", help="Sample among the best that hold the share P; 1: all."),
    ] = SamplingParams().top_p,
    min_p: Annotated[
        float,
        typer.Option(
            "--min-p", metavar="P", help="Leave out tokens below P times the best one's share; 0: none."
        ),
    ] = SamplingParams().min_p,
    seed: Annotated[int, typer.Option("-s", "--seed", metavar="N", help="Of sampling; -1: random.")] = -1,
    cache: Annotated[
        str,
        typer.Option(
            "--cache",
            metavar="SIZE",
            help="Device memory for experts: a share of all (17%), a number of MiB, auto (what is free), "
            "or 0 (only with --stock).",
        ),
    ] = "auto",
    device: Annotated[
        str,
        typer.Option(
            "-dev",
            "--device",
            metavar="NAME",
            help="auto (the first GPU, else the CPU), cpu (an emulated device), none (every expert on the "
            "host, with the engine's own kernels), or a name such as CUDA0.",
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
    rpc: Annotated[
        str | None, typer.Option("--rpc", metavar="HOST:PORT", help="Use the device of a ggml-rpc-server.")
    ] = None,
    spec_type: Annotated[
        str | None,
        typer.Option(
            "--spec-type",
            metavar="draft|ngram|none",
            help="Who drafts: the draft model, earlier text (prompt lookup), nobody. "
            "Default: draft with -md, else none.",
        ),
    ] = None,
    draft_max: Annotated[
        int | None,
        typer.Option(
            "--draft-max",
            metavar="N",
            help=f"Tokens to draft per step at most. Default: {DEFAULT_DRAFT_MAX}; "
            f"{DEFAULT_DRAFT_CAP} where --speculation decides.",
        ),
    ] = None,
    draft_p_min: Annotated[
        float,
        typer.Option(
            "--draft-p-min",
            metavar="P",
            help="End a draft where the draft model's likeliest next token has a lower probability.",
        ),
    ] = 0.0,
    speculation: Annotated[
        str | None,
        typer.Option(
            "--speculation",
            metavar="NAME",
            help=f"How many tokens to draft: {', '.join(CONTROLLERS)}, or auto (the best of these). "
            "static drafts alike in every run, so that sampled text repeats with its seed; the others draft "
            "as long as it pays. Default: auto; static with --draft-max, or with --temp and --seed.",
        ),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show how draft lengths were chosen, and why.")
    ] = False,
    estimator: Annotated[
        str, typer.Option("--estimator", metavar="NAME", help=f"Of expected demand: {', '.join(ESTIMATORS)}.")
    ] = SchedulerConfig().estimator,
    threshold: Annotated[
        str,
        typer.Option(
            "--threshold",
            metavar="auto|N",
            help="Utility from which an expert belongs on the device; auto: balanced.",
        ),
    ] = "auto",
    without: Annotated[
        str,
        typer.Option(
            "--without", metavar="LIST", help=f"Leave parts out, to measure them: {','.join(ABLATIONS)}."
        ),
    ] = "",
    copy_gb_s: Annotated[
        float,
        typer.Option(
            "--copy-gb-s",
            metavar="GB/S",
            help="Slow copies down to this speed, to emulate another link; 0: no. (Was called --link-gb-s "
            "once, which now means something else.)",
        ),
    ] = 0.0,
    link_gb_s: LinkGbS = None,
    stock: Annotated[
        bool,
        typer.Option(
            "--stock",
            help="Plain llama.cpp for comparison: no engine, all experts on the host, same drafting and same "
            "layout of weights. The settings of the split have no effect.",
        ),
    ] = False,
    repack: Annotated[
        bool,
        typer.Option(
            "--repack", help="With --stock: let llama.cpp repack weights for the CPU; bits may then differ."
        ),
    ] = False,
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write what happened as one JSON object; - for stdout."),
    ] = None,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show llama.cpp's log.")] = False,
) -> None:
    """Generate text after a prompt.

    The routed experts of each layer are split between a device and the host; --stock runs the same without
    the split. Ctrl-C stops and prints the figures so far.
    """  # fmt: skip
    text = read_prompt(prompt, file)
    check_json_target(json_file)
    options = RunOptions(
        model=model,
        draft=model_draft,
        n_predict=n_predict,
        n_ctx=ctx_size,
        n_threads=threads,
        n_gpu_layers=gpu_layers,
        sampling=SamplingParams(temp=temp, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed),
        stock=stock,
        repack=repack,
        device=device,
        host_kernels=host_kernels,
        cpu_range=cpu_range,
        rpc=rpc,
        cache=CacheSize(text=cache),
        spec_type=_spec_type(spec_type),
        draft_max=draft_max,
        draft_p_min=draft_p_min,
        speculation=speculation,
        explain=explain,
        estimator=estimator,
        threshold=_threshold(threshold),
        without=parse_ablations(without),
        copy_gb_s=copy_gb_s,
        link_gb_s=link_gb_s,
        verbose=verbose,
    )
    generation = run_once(options, text, json_file)
    if generation.stop_reason == "interrupted":
        raise typer.Exit(EXIT_INTERRUPTED)


def run_once(options: RunOptions, prompt: str, json_file: str | None) -> Generation:
    """Load, generate while showing the text, then show the table and write the JSON."""
    out = sys.stderr if json_file == STDOUT else sys.stdout
    with Interrupt.watch() as interrupt:
        with loading_bar(interrupt) as progress:
            session = Session(options, progress)
        with session:
            generation = generate_shown(session, prompt, interrupt, out)
            show_result(session, generation, json_file)
    return generation


def generate_shown(session: Session, prompt: str, interrupt: Interrupt, out: TextIO) -> Generation:
    """Generate and write the text to `out` as it comes."""
    stream = session.text_stream()

    def show(token: int) -> None:
        out.write(stream.feed(token))
        out.flush()

    generation = session.generate(session.tokenize(prompt), show, interrupt)
    out.write(stream.finish() + "\n")
    out.flush()
    return generation


def show_result(session: Session, generation: Generation, json_file: str | None) -> None:
    console = error_console()
    if generation.stop_reason == "context":
        console.print(
            f"stopped: the context is full ({session.context.n_ctx} tokens of prompt and text); raise -c",
            style="yellow",
        )
    console.print()
    print_table(console, session, generation)
    if session.options.explain and session.speculation:
        for line in explain_lines(session.speculation.decisions()):
            console.print(line, style="dim", markup=False, soft_wrap=True)
    if json_file is not None:
        write_json(json_file, run_dict(session, generation))


def _spec_type(name: str | None) -> SpecType | None:
    match name:
        case None | "draft" | "ngram" | "none":
            return name
    raise ConfigError("--spec-type", name, "draft, ngram, none")


def _threshold(text: str) -> int | None:
    """None: auto."""
    if text == "auto":
        return None
    if not text.isdecimal():
        raise ConfigError("--threshold", text, "auto, or a whole number from 1")
    return int(text)
