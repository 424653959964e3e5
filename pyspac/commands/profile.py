"""`pyspac profile`: what wider forward passes cost here, and what that says about speculation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

import pyspac
from pyspac.checks import check_int
from pyspac.commands import options as o
from pyspac.commands.common import (
    check_json_target,
    check_png,
    error_console,
    loading_bar,
    output_console,
    read_prompt,
)
from pyspac.commands.json_file import STDOUT, write_json
from pyspac.commands.model_names import find_files
from pyspac.commands.profile_figure import draw
from pyspac.commands.profile_sweep import Places, check_has_effect, report_rounds, show_sweep
from pyspac.commands.stuck import computes
from pyspac.forward import profiler
from pyspac.forward.options import CacheSize, ForwardOptions
from pyspac.forward.runner import Runner
from pyspac.model.tensor_split import parse_tensor_split
from pyspac.scheduler.config import SchedulerConfig
from pyspac.speculation.sweep import Sweep
from pyspac.speculation.tolerance import SHOWN_ACCEPTANCES, Profile
from pyspac.talk.interrupt import Interrupt

MIN_WIDTH: Final = 2
MAX_WIDTH: Final = 16
N_PROMPT: Final = 128

MeasuredText = Annotated[
    Path | None,
    typer.Option("-f", "--file", metavar="FILE", help="The text to measure on. Default: a module of pyspac."),
]
WidthMax = Annotated[int, typer.Option("--width-max", metavar="N", help="Widest forward pass, in tokens.")]
PromptTokens = Annotated[
    int | None,
    typer.Option(
        "--prompt-tokens",
        metavar="N",
        help="Tokens in the context beforehand. Default: 128.",
    ),
]
SequencesList = Annotated[
    str | None,
    typer.Option(
        "--sequences",
        metavar="N,...",
        help="Measure batches of so many sequences, such as 1,2,4,8, at widths up to --width-max.",
    ),
]
ContextsList = Annotated[
    str | None,
    typer.Option(
        "--contexts", metavar="N,...", help="Measure after so many tokens per sequence, such as 128,1024."
    ),
]


@computes
def profile(
    model_word: o.ModelWord = None,
    model: o.Model = None,
    hf_repo: o.HfRepo = None,
    model_draft: o.ModelDraft = None,
    hf_repo_draft: o.HfRepoDraft = None,
    file: MeasuredText = None,
    width_max: WidthMax = MAX_WIDTH,
    rounds: o.Rounds = 15,
    prompt_tokens: PromptTokens = None,
    sequences: SequencesList = None,
    contexts: ContextsList = None,
    ctx_size: o.CtxSize = None,
    threads: o.Threads = None,
    gpu_layers: o.GpuLayers = None,
    cache: o.Cache = "auto",
    device: o.Device = "auto",
    rpc: o.Rpc = None,
    tensor_split: o.TensorSplit = "",
    stock: o.Stock = False,
    json_file: o.JsonFile = None,
    png: o.Png = None,
    verbose: o.Verbose = False,
) -> None:
    """Measure what it costs to verify several tokens at once.

    Prints tau(n) = T(1) / T(n), the drafters' cost, the speedup by draft length and acceptance, the
    acceptance from which each draft length pays, and advice. With --sequences or --contexts: tau(n) by
    sequences in a batch and by contexts. Nothing is generated.
    """  # fmt: skip
    n_prompt = N_PROMPT if prompt_tokens is None else prompt_tokens
    _check(width_max, rounds, n_prompt, CacheSize(text=cache), stock)
    _check_targets(json_file, png)
    places = _places(model_draft or hf_repo_draft, sequences, contexts, prompt_tokens, width_max, rounds)
    target, draft = find_files(model, hf_repo, model_draft, hf_repo_draft)
    if places is not None:
        places.check_fits(target)
    options = ForwardOptions(
        model=target, draft=draft, n_threads=threads, n_gpu_layers=gpu_layers,
        stock=stock, device=device, rpc=rpc, tensor_split=parse_tensor_split(tensor_split), verbose=verbose,
        cache=CacheSize(text=cache), width=width_max, scheduler=SchedulerConfig(n_draft_max=width_max - 1),
        n_ctx=ctx_size if ctx_size is not None or places is None else places.n_ctx,
        n_sequences=1 if places is None else max(places.sequences),
        max_batch=MAX_WIDTH if places is None else max(MAX_WIDTH, places.max_batch),
        repack=stock,  # llama.cpp's default
    )  # fmt: skip
    with (
        Interrupt.watch() as interrupt,
        loading_bar(interrupt) as progress,
        Runner(options, progress) as runner,
    ):
        tokens = runner.model.vocab.tokenize(_text(file))
        measured = (
            _profile(runner, tokens, width_max, rounds, n_prompt, progress)
            if places is None
            else places.measure(runner, tokens, progress)
        )
        where = _where(runner)
    _report(measured, where, json_file, png)


def _places(
    draft: Path | str | None,
    sequences: str | None,
    contexts: str | None,
    prompt_tokens: int | None,
    width_max: int,
    n_rounds: int,
) -> Places | None:
    """Where a sweep measures; None: no sweep is asked for. Raises ConfigError."""
    if sequences is None and contexts is None:
        return None
    check_has_effect(draft, contexts, prompt_tokens)
    n_prompt = N_PROMPT if prompt_tokens is None else prompt_tokens
    return Places.parse(sequences or "1", contexts or str(n_prompt), width_max, n_rounds)


def _profile(
    runner: Runner, tokens: list[int], width_max: int, n_rounds: int, n_prompt: int, progress: Any
) -> Profile:
    measuring = profiler.Profiler(runner, width_max=width_max, n_rounds=n_rounds, n_prompt=n_prompt)
    return measuring.run(tokens, report_rounds(progress, n_rounds))


def _report(
    measured: Profile | Sweep, where: dict[str, Any], json_file: str | None, png: Path | None
) -> None:
    console = error_console() if json_file == STDOUT else output_console()
    console.print(f"{where['model']}: {where['placement']}, {where['n_threads']} threads")
    if isinstance(measured, Sweep):
        show_sweep(console, measured)
    else:
        show(console, measured)
    if measured.is_noisy:
        console.print("times vary a lot: is other work running? Repeat on a quiet machine", style="yellow")
    console.print(_sentence(measured.advice()))
    if json_file is not None:
        write_json(json_file, {**where, **measured.to_dict()})
    if png is not None:
        draw(measured, png, f"{where['model']}: {where['placement']}")
        console.print(f"figure: {png}")


def show(console: Console, measured: Profile) -> None:
    """A table per drafter."""
    for drafter, samples in measured.drafters.items():
        delta = f"{samples.median_us / 1e3:.3f} ms per token, delta {measured.delta(drafter):.3f}"
        table = Table(title=f"{drafter} drafter: {delta}", title_justify="left", box=None)
        speedups = [f"S({a})" for a in SHOWN_ACCEPTANCES]
        for name in ("n", "T(n) ms", "+-", "tau", "experts", "share", *speedups, "from"):
            table.add_column(name, justify="right")
        for row in measured.rows(drafter):
            table.add_row(*row)
        console.print(table)
    if text := measured.experts_text():
        console.print(text)
    console.print(
        "n: tokens in a pass, n - 1 of them drafted; +-: half the quartiles' distance; tau: T(1) / T(n); "
        "experts: distinct ones per layer; share: of T(n), theirs; S: speedup at that acceptance; from: "
        "acceptance from which it pays; delta: a drafted token's time / T(1)",
        style="dim",
    )


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def _where(runner: Runner) -> dict[str, Any]:
    """What the numbers hold for."""
    split = runner.split
    if split is None:
        placement = f"stock llama.cpp on {runner.device.name}"
    elif runner.options.is_host_only:
        placement = f"every expert on the host, {split.info.kernels} kernels"
    else:
        share = split.info.pool_bytes / max(1, split.info.total_bytes)
        placement = f"split with {_device_text(runner)}, room for {min(share, 1.0):.0%} of the experts"
    return {
        "model": runner.options.model.name,
        "draft": runner.options.draft.name if runner.options.draft else None,
        "placement": placement,
        "device": runner.device.name,
        "emulated": bool(split and split.info.is_emulated),
        "n_threads": runner.n_threads,
        "pyspac": pyspac.__version__,
    }


def _device_text(runner: Runner) -> str:
    """The device's name, and that it is emulated where it is."""
    assert runner.split is not None
    info = runner.split.info
    if not info.is_emulated:
        return info.device
    return "a device emulated on the CPU" if runner.device.is_cpu else f"{info.device} with an emulated link"


def _text(file: Path | None) -> str:
    return read_prompt(None, file or Path(profiler.__file__))


def _check(width_max: int, rounds: int, prompt_tokens: int, cache: CacheSize, stock: bool) -> None:
    check_int("--width-max", width_max, MIN_WIDTH, MAX_WIDTH)
    check_int("--rounds", rounds, 1)
    check_int("--prompt-tokens", prompt_tokens, 1)
    cache.check_beside(stock=stock)


def _check_targets(json_file: str | None, png: Path | None) -> None:
    check_json_target(json_file)
    check_png(png)
