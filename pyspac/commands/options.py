"""The options that more than one command has, each written once: its type, flags and help.

A command's signature names them and gives the defaults; options of one command lie beside that command.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from pyspac.commands.grouped_help import MORE
from pyspac.forward.options import DEFAULT_N_CTX
from pyspac.scheduler.config import ESTIMATORS, NO_PREDICTOR, PREDICTORS, SchedulerConfig
from pyspac.speculation.manager import CONTROLLERS, DEFAULT_CONTROLLER, DEFAULT_DRAFT_CAP, DEFAULT_DRAFT_MAX

# ---- the groups of `--help`; the others come first, under "Options"

DRAFTING: Final = "Drafting: tokens that are proposed, and verified together (docs/speculation.md)"
EXPERTS: Final = "Experts: where they are, and who computes them"

# ---- models and prompts

ModelWord = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A GGUF file (of several parts the first), or a Hugging Face name: USER/MODEL[:QUANT].",
    ),
]
Model = Annotated[Path | None, typer.Option("-m", "--model", metavar="FILE", help="MODEL, as a file.")]
ModelDraft = Annotated[
    Path | None,
    typer.Option(
        "-md",
        "--model-draft",
        metavar="FILE",
        help="A small model of the same family, which drafts tokens.",
        rich_help_panel=DRAFTING,
    ),
]
Mtp = Annotated[
    Path | None,
    typer.Option(
        "--mtp",
        metavar="FILE",
        help="An adapter with mask tokens (scripts/train_mtp.py), which drafts as --spec-type draft-lora.",
        rich_help_panel=MORE,
    ),
]
HfRepo = Annotated[
    str | None,
    typer.Option(
        "-hf",
        "-hfr",
        "--hf-repo",
        metavar="USER/MODEL[:QUANT]",
        help="MODEL, by its Hugging Face name.",
    ),
]
HfRepoDraft = Annotated[
    str | None,
    typer.Option(
        "-hfd",
        "-hfrd",
        "--hf-repo-draft",
        metavar="USER/MODEL[:QUANT]",
        help="The draft model, by its Hugging Face name.",
        rich_help_panel=DRAFTING,
    ),
]
Server = Annotated[
    str | None,
    typer.Option(
        "--server",
        metavar="URL",
        help="Use the server at this address instead of starting one; LLAMA_API_KEY holds its key.",
    ),
]
Prompt = Annotated[str | None, typer.Option("-p", "--prompt", metavar="TEXT", help="The prompt.")]
PromptFile = Annotated[
    Path | None,
    typer.Option("-f", "--file", metavar="FILE", help="A text file with the prompt; -: stdin."),
]
NPredict = Annotated[
    int,
    typer.Option("-n", "--n-predict", metavar="N", help="Tokens to generate; -1: until the end token."),
]

# ---- the machine

CtxSize = Annotated[
    int | None,
    typer.Option(
        "-c",
        "--ctx-size",
        metavar="N",
        envvar="LLAMA_ARG_CTX_SIZE",
        show_envvar=False,
        help="Context in tokens, for all slots of a server together; 0: the model's own. Default: "
        f"what an eighth of free memory holds; {DEFAULT_N_CTX} in bench, inspect and profile.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "-t",
        "--threads",
        metavar="N",
        help="CPU threads. Default: one per usable physical core.",
    ),
]
CpuRange = Annotated[
    str | None,
    typer.Option(
        "-Cr",
        "--cpu-range",
        metavar="LO-HI",
        help="Cores to use, such as 0-7; each engine thread is pinned to one. Default: all.",
        rich_help_panel=MORE,
    ),
]
GpuLayers = Annotated[
    int | None,
    typer.Option(
        "-ngl",
        "--gpu-layers",
        "--n-gpu-layers",
        metavar="N",
        help="Layers on the device, without their experts. Default: all; none without a GPU.",
    ),
]
Device = Annotated[
    str,
    typer.Option(
        "-dev",
        "--device",
        metavar="NAME",
        envvar="LLAMA_ARG_DEVICE",
        show_envvar=False,
        help="auto (all GPUs), none (CPU only), names such as CUDA0,CUDA1, or emulated (the CPU "
        "plays the GPU; emulated:0.3: at 0.3 of its speed).",
    ),
]
Rpc = Annotated[
    str | None,
    typer.Option(
        "--rpc",
        metavar="HOST:PORT",
        envvar="LLAMA_ARG_RPC",
        show_envvar=False,
        help="Use the devices of a ggml-rpc-server; separate several with commas.",
        rich_help_panel=MORE,
    ),
]
TensorSplit = Annotated[
    str,
    typer.Option(
        *("-ts", "--tensor-split"),
        metavar="N,N",
        show_default=False,
        help="Each device's share of the layers, not all 0. Default: by their free memory.",
    ),
]

# ---- the split

Cache = Annotated[
    str,
    typer.Option(
        "--cache",
        metavar="SIZE",
        help="GPU memory for experts: a size, a share of all experts (25%), or auto (what is "
        "free); one per device with commas.",
        rich_help_panel=EXPERTS,
    ),
]
Ram = Annotated[
    str | None,
    typer.Option(
        "--ram",
        metavar="SIZE",
        help="Memory for experts, the rest of which stay on disk; sizes as for --cache. Default: "
        "PYSPAC_RAM, else auto if the model does not fit.",
        rich_help_panel=EXPERTS,
    ),
]
Lossy = Annotated[
    str | None,
    typer.Option(
        "--lossy",
        metavar="KIND:STRENGTH",
        show_default=False,
        help="Not exact, maybe faster: drop:N skips experts that are not on the device (with --ram: not in "
        "memory), except each token's best N; lowbit:N:FILE takes those from FILE, the model in fewer bits "
        "(llama-quantize); substitute:X takes a similar one that is; route:X has routers prefer those "
        "that are.",
        rich_help_panel=MORE,
    ),
]
MaxKl = Annotated[
    float | None,
    typer.Option(
        "--max-kl",
        metavar="X",
        show_default=False,
        help="The most that --lossy may cost: mean KL divergence in nats per token, estimated on samples. "
        "Beyond it tokens are computed exactly.",
        rich_help_panel=MORE,
    ),
]
HostKernels = Annotated[
    str,
    typer.Option(
        "--host-kernels",
        metavar="NAME",
        help="Who computes the host's experts: spac (the engine's own kernels), ggml (bits as "
        "llama.cpp; needs a device), or auto (ggml if the device is emulated, else spac).",
        rich_help_panel=MORE,
    ),
]
Stock = Annotated[
    bool,
    typer.Option(
        "--stock",
        help="Plain llama.cpp, for comparison: no engine, experts on the host, repacked weights.",
        rich_help_panel=EXPERTS,
    ),
]

# ---- sampling and drafting

SpecTypeName = Annotated[
    str | None,
    typer.Option(
        "--spec-type",
        metavar="NAME",
        help="What drafts: draft (the draft model), ngram (the text so far), draft-lora (--mtp), "
        "none, or a type of llama.cpp's (docs/speculation.md); in a list, the first that "
        "finds something. Default: what -md or --mtp implies, else none.",
        rich_help_panel=DRAFTING,
    ),
]
DraftMax = Annotated[
    int | None,
    typer.Option(
        "--draft-max",
        metavar="N",
        help=f"Most tokens to draft per step. Default: {DEFAULT_DRAFT_CAP}; {DEFAULT_DRAFT_MAX} if the "
        "length is fixed.",
        rich_help_panel=DRAFTING,
    ),
]
SpeculationName = Annotated[
    str | None,
    typer.Option(
        "--speculation",
        metavar="NAME",
        help=f"How to choose the draft length: {', '.join(CONTROLLERS)}, or auto ({DEFAULT_CONTROLLER}). "
        "Default: auto; static (a fixed length) with --draft-max or --seed.",
        rich_help_panel=MORE,
    ),
]

# ---- the scheduler

Policy = Annotated[
    str,
    typer.Option(
        "--policy",
        metavar="NAME|FILE",
        help=f"How to choose experts for the device: {', '.join(ESTIMATORS)}, EVICTION+MISS such as "
        "lru+fetch, or settings as TOML: a file, or text such as threshold=2 (docs/policies.md).",
        rich_help_panel=MORE,
    ),
]
DEFAULT_PREDICTORS: Final = ",".join(SchedulerConfig().predict) or NO_PREDICTOR
AttachPredictors = Annotated[
    str,
    typer.Option(
        "--predict",
        metavar="LIST",
        help=f"How to guess the experts of the next tokens: token, or {NO_PREDICTOR}.",
        rich_help_panel=MORE,
    ),
]
Predictors = Annotated[
    str,
    typer.Option(
        "--predict",
        metavar="LIST",
        help=f"How to guess the experts of the next tokens: {', '.join(PREDICTORS)}, or {NO_PREDICTOR}.",
        rich_help_panel=MORE,
    ),
]
CpuShare = Annotated[
    float,
    typer.Option(
        "--cpu-share",
        metavar="X",
        help="Share of one core for the scheduler.",
        rich_help_panel=MORE,
    ),
]
MetricsPort = Annotated[
    int | None,
    typer.Option(
        "--metrics-port",
        metavar="N",
        help="Port for the scheduler's Prometheus metrics; 0: any free one. Default: no metrics.",
        rich_help_panel=MORE,
    ),
]
MetricsHost = Annotated[
    str,
    typer.Option(
        "--metrics-host",
        metavar="HOST",
        help="Address that --metrics-port listens on.",
        rich_help_panel=MORE,
    ),
]
WarmStart = Annotated[
    bool,
    typer.Option(
        "--warm-start/--no-warm-start",
        help="Start with what the last run learned and save it at the end, or do neither.",
        rich_help_panel=MORE,
    ),
]

# ---- output

JsonFile = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", help="Write the result as a JSON object; -: to stdout."),
]
LogJson = Annotated[
    bool,
    typer.Option(
        "--log-json",
        help="Log as JSON on stdout; llama-server's log stays on stderr.",
        rich_help_panel=MORE,
    ),
]
Rounds = Annotated[int, typer.Option("--rounds", metavar="N", help="How often to measure each thing.")]
Png = Annotated[Path | None, typer.Option("--png", metavar="FILE", help="Draw the figure; needs matplotlib.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Show llama.cpp's log.")]
