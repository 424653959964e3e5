"""`pyspac run`: generate text after a prompt, split or stock."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Final, TextIO

import typer
from rich.console import Console

from pyspac.commands import options as o
from pyspac.commands.chat import talk
from pyspac.commands.common import (
    EXIT_INTERRUPTED,
    check_json_target,
    error_console,
    loading_bar,
    read_prompt,
    say_what_has_no_effect,
)
from pyspac.commands.json_file import STDOUT, write_json
from pyspac.commands.model_names import find_files
from pyspac.commands.saved_defaults import with_saved
from pyspac.commands.stuck import computes
from pyspac.generate.chat_template import ChatTemplate, Message
from pyspac.generate.decode import Generation, Interrupt
from pyspac.generate.loading import Loading
from pyspac.generate.memory_tier import given_ram
from pyspac.generate.options import CacheSize, RunOptions, parse_numbers, parse_threshold
from pyspac.generate.report import print_table, run_dict
from pyspac.generate.sampling import SamplingParams
from pyspac.generate.session import Session
from pyspac.generate.spec_types import parse_spec_type
from pyspac.generate.tensor_split import parse_tensor_split
from pyspac.scheduler.config import parse_ablations, parse_predictors
from pyspac.speculation.explain import explain as explain_lines

SAMPLING: Final = SamplingParams()  # the defaults

DraftPMin = Annotated[
    float,
    typer.Option(
        "--draft-p-min",
        metavar="P",
        help="End a draft where the draft model's likeliest next token has a lower probability.",
        rich_help_panel=o.DRAFTING,
    ),
]
Chat = Annotated[
    bool, typer.Option("--chat", help="The prompt is a message: apply the model's chat template to it.")
]
Explain = Annotated[
    bool,
    typer.Option(
        "--explain",
        help="Show how draft lengths were chosen, and why.",
        rich_help_panel=o.DRAFTING,
    ),
]
CopyGbS = Annotated[
    str,
    typer.Option(
        "--copy-gb-s",
        metavar="GB/S",
        show_default=False,
        help="Slow copies down to this speed, to emulate another link, with commas one for each "
        "device; 0: full speed.",
        rich_help_panel=o.SCHEDULER,
    ),
]


@computes
def run(
    command: typer.Context,
    model: o.ModelIfAny = None,
    hf_repo: o.HfRepo = None,
    model_draft: o.ModelDraft = None,
    hf_repo_draft: o.HfRepoDraft = None,
    mtp: o.Mtp = None,
    prompt: o.Prompt = None,
    file: o.PromptFile = None,
    chat: Chat = False,
    chat_template_file: o.ChatTemplateFile = None,
    n_predict: o.NPredict = -1,
    ctx_size: o.CtxSize = None,
    threads: o.Threads = None,
    cpu_range: o.CpuRange = None,
    gpu_layers: o.GpuLayers = None,
    temp: o.Temp = SAMPLING.temp,
    top_k: o.TopK = SAMPLING.top_k,
    top_p: o.TopP = SAMPLING.top_p,
    min_p: o.MinP = SAMPLING.min_p,
    seed: o.Seed = SAMPLING.seed,
    cache: o.Cache = "auto",
    ram: o.Ram = None,
    device: o.Device = "auto",
    host_kernels: o.HostKernels = "auto",
    rpc: o.Rpc = None,
    tensor_split: o.TensorSplit = "",
    spec_type: o.SpecTypeName = None,
    draft_max: o.DraftMax = None,
    draft_p_min: DraftPMin = 0.0,
    speculation: o.SpeculationName = None,
    explain: Explain = False,
    estimator: o.Estimator = o.DEFAULT_ESTIMATOR,
    threshold: o.Threshold = "auto",
    without: o.Without = "",
    predict: o.Predictors = o.DEFAULT_PREDICTORS,
    copy_gb_s: CopyGbS = "",
    link_gb_s: o.LinkGbS = None,
    stock: o.Stock = False,
    repack: o.Repack = None,
    json_file: o.JsonFile = None,
    verbose: o.Verbose = False,
) -> None:
    """Generate text after a prompt; without one, on a terminal, it is a chat.

    Experts are split between GPU and host, if there is a GPU. Example: pyspac run -m MODEL.gguf -p Once -n 9
    """
    text = prompt_or_chat(prompt, file, json_file)
    target, draft = find_files(model, hf_repo, model_draft, hf_repo_draft)
    options = RunOptions(
        model=target, n_gpu_layers=gpu_layers, host_kernels=host_kernels, without=parse_ablations(without),
        mtp=mtp, n_predict=n_predict, cpu_range=cpu_range, speculation=speculation, draft_p_min=draft_p_min,
        n_ctx=ctx_size, sampling=SamplingParams(temp=temp, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed),
        n_threads=threads, explain=explain, draft_max=draft_max, estimator=estimator, link_gb_s=link_gb_s,
        cache=CacheSize(text=cache), threshold=parse_threshold(threshold), predict=parse_predictors(predict),
        device=device, tensor_split=parse_tensor_split(tensor_split), spec_type=parse_spec_type(spec_type),
        device_copy_gb_s=parse_numbers("--copy-gb-s", copy_gb_s), repack=stock if repack is None else repack,
        draft=draft, rpc=rpc, stock=stock, ram=given_ram(ram, is_stock=stock), verbose=verbose)  # fmt: skip
    run_or_talk(with_saved(options, command), text, json_file, chat, chat_template_file)


def prompt_or_chat(prompt: str | None, file: Path | None, json_file: str | None) -> str | None:
    """The prompt; None: there is none, and somebody who can talk. Raises ConfigError."""
    check_json_target(json_file)
    can_talk = json_file is None and sys.stdin.isatty() and sys.stdout.isatty()
    return None if prompt is None and file is None and can_talk else read_prompt(prompt, file)


def run_or_talk(
    options: RunOptions, prompt: str | None, json_file: str | None, as_chat: bool, template: Path | None
) -> None:
    if prompt is None:
        talk(options, template_file=template)
    elif (
        run_once(options, prompt, json_file, as_chat or template is not None, template).stop_reason
        == "interrupted"
    ):
        raise typer.Exit(EXIT_INTERRUPTED)


def run_once(
    options: RunOptions,
    prompt: str,
    json_file: str | None,
    as_chat: bool = False,
    template_file: Path | None = None,
) -> Generation:
    """Load, generate while showing the text, then show the table and write the JSON."""
    out = sys.stderr if json_file == STDOUT else sys.stdout
    loading = Loading.of(options)
    if as_chat:  # a template that cannot be used is found before anything is loaded
        template = ChatTemplate(loading.preflight.header, template_file)
        prompt = template.text([Message("user", prompt)])
    with Interrupt.watch() as interrupt:
        with loading_bar(interrupt) as progress:
            session = Session(options, progress, loading)
        with session:
            say_what_has_no_effect(session)
            vocab = session.model.vocab
            tokens = template.tokens(prompt, vocab) if as_chat else vocab.tokenize(prompt)
            generation = generate_shown(session, tokens, interrupt, out)
            show_result(session, generation, json_file)
    return generation


def generate_shown(session: Session, prompt: list[int], interrupt: Interrupt, out: TextIO) -> Generation:
    """Generate after the tokens `prompt`, and write the text to `out` as it comes."""
    stream = session.text_stream()

    def show(token: int) -> None:
        out.write(stream.feed(token))
        out.flush()

    generation = session.generate(prompt, show, interrupt)
    out.write(stream.finish() + "\n")
    out.flush()
    return generation


def show_result(session: Session, generation: Generation, json_file: str | None) -> None:
    console = error_console()
    if generation.stop_reason == "context":
        console.print(
            f"stopped: the context is full ({session.context.n_ctx} tokens of prompt and text); "
            f"{session.context.room_advice}",
            style="yellow",
        )
    console.print()
    print_table(console, session, generation)
    if session.options.explain:
        show_decisions(console, session)
    if json_file is not None:
        write_json(json_file, run_dict(session, generation))


def show_decisions(console: Console, session: Session) -> None:
    """For `--explain`: what was decided, or why there was nothing to decide."""
    if session.speculation:
        for line in explain_lines(session.speculation.decisions()):
            console.print(line, style="dim", markup=False, soft_wrap=True)
    elif session.options.effective_draft_max:
        console.print(
            f"the draft length is fixed at {session.options.effective_draft_max}, so there is nothing to "
            "explain: have it chosen with --speculation auto",
            style="yellow",
        )
    else:
        console.print(
            "nothing drafts, so there is nothing to explain: give -md or --spec-type", style="yellow"
        )
