"""`pyspac train-head`: an EAGLE-3 head for a model, trained on what the model itself writes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from pyspac.commands import options as o
from pyspac.commands.common import (
    check_json_target,
    check_target,
    error_console,
)
from pyspac.commands.json_file import write_json
from pyspac.commands.model_names import find_files
from pyspac.commands.stuck import computes
from pyspac.engine.cpus import default_n_threads
from pyspac.errors import EXIT_INTERRUPTED, UsageError
from pyspac.forward.options import CacheSize, ForwardOptions
from pyspac.model.memory_tier import given_ram
from pyspac.train.packages import missing_packages

PACKAGES: Final = ("torch", "tqdm")  # of the extra `train`


Output = Annotated[
    Path, typer.Option("-o", "--output", metavar="FILE", help="The head to write, a GGUF file.")
]
Text = Annotated[
    Path | None,
    typer.Option(
        "-f",
        "--file",
        metavar="PATH",
        help="A text file, or a folder of them, to begin the model's texts with; best like your "
        "prompts. Default: Python's standard library.",
    ),
]
WorkDir = Annotated[
    Path | None,
    typer.Option(
        "--work-dir",
        metavar="DIR",
        help="Texts, checkpoint and log, kept between runs. Default: the head's name with .work.",
    ),
]
Minutes = Annotated[
    float, typer.Option("--minutes", metavar="N", help="Time for training, after the texts are written.")
]
Steps = Annotated[
    int | None, typer.Option("--steps", metavar="N", help="Steps of the optimiser, instead of --minutes.")
]
Texts = Annotated[int, typer.Option("--texts", metavar="N", help="Texts for the model to write.")]
TextTokens = Annotated[
    int,
    typer.Option("-c", "--ctx-size", metavar="N", help="Tokens of a text; the model writes half of them."),
]
Rows = Annotated[int, typer.Option("--rows", metavar="N", help="Texts per step of the optimiser.")]
LearningRate = Annotated[
    float | None,
    typer.Option(
        "--lr", metavar="X", help="Highest learning rate. Default: 0.0015, less for models wider than 256."
    ),
]
ReportEvery = Annotated[
    float, typer.Option("--report-every", metavar="MINUTES", help="How often to count accepted drafts.")
]


@computes
def train_head(
    output: Output,
    model_word: o.ModelWord = None,
    model: o.Model = None,
    hf_repo: o.HfRepo = None,
    file: Text = None,
    work_dir: WorkDir = None,
    minutes: Minutes = 60,
    steps: Steps = None,
    texts: Texts = 4096,
    ctx_size: TextTokens = 192,
    rows: Rows = 4,
    lr: LearningRate = None,
    report_every: ReportEvery = 5,
    threads: o.Threads = None,
    gpu_layers: o.GpuLayers = None,
    device: o.Device = "auto",
    cache: o.Cache = "auto",
    ram: o.Ram = None,
    json_file: o.JsonFile = None,
) -> None:
    """Train an EAGLE-3 head, which drafts for the model.

    The model continues pieces of text; a head of one layer learns from its hidden states to predict it. The
    same command resumes; Ctrl-C during training writes the head as it is. Use it in run and serve with
    -md HEAD --spec-type draft-eagle3. Needs the extra `train`.
    """
    if missing := missing_packages(PACKAGES):
        raise UsageError(f"train-head: {missing}")
    from pyspac.train.train_head import HeadOptions
    from pyspac.train.train_head import train_head as train

    check_json_target(json_file)
    check_target("-o", output)
    target, _ = find_files(model, hf_repo)
    options = HeadOptions(
        run=run_options(target, ctx_size, threads, gpu_layers, device, cache, ram),
        output=output, text=file, work_dir=work_dir or output.with_name(output.name + ".work"),
        n_text=texts, n_token=ctx_size, rows=rows, lr=lr,
        minutes=minutes, steps=steps, report_every=report_every,
    )  # fmt: skip
    result = train(options)
    error_console().print(
        f"wrote {output}: give it with -md {output} --spec-type draft-eagle3"
        + ("; the same command trains on" if result["interrupted"] else "")
    )
    if json_file is not None:
        write_json(json_file, result)
    if result["interrupted"]:
        raise typer.Exit(EXIT_INTERRUPTED)


def run_options(
    model: Path,
    ctx_size: int,
    threads: int | None,
    gpu_layers: int | None,
    device: str,
    cache: str,
    ram: str | None,
) -> ForwardOptions:
    """How the model runs while it writes. Raises a PyspacError."""
    from pyspac.train.capture import N_TEXTS

    return ForwardOptions(
        model=model, n_ctx=ctx_size, n_sequences=N_TEXTS, n_threads=threads or default_n_threads(),
        n_gpu_layers=gpu_layers, device=device, cache=CacheSize(text=cache),
        ram=given_ram(ram),
    )  # fmt: skip
