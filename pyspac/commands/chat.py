"""`pyspac chat`: a conversation in a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from pyspac.commands import options as o
from pyspac.commands.chat_view import ChatView
from pyspac.commands.common import error_console, loading_bar, say_what_has_no_effect
from pyspac.commands.model_names import find_files
from pyspac.commands.saved_defaults import with_saved
from pyspac.commands.stuck import computes
from pyspac.generate.chat import Conversation
from pyspac.generate.chat_template import ChatTemplate
from pyspac.generate.decode import Interrupt
from pyspac.generate.loading import Loading
from pyspac.generate.memory_tier import given_ram
from pyspac.generate.options import CacheSize, RunOptions
from pyspac.generate.sampling import SamplingParams
from pyspac.generate.session import Session
from pyspac.generate.spec_types import parse_spec_type
from pyspac.generate.tensor_split import parse_tensor_split

SAMPLING: Final = SamplingParams(temp=0.8)  # llama.cpp's

System = Annotated[
    str | None, typer.Option("-sys", "--system-prompt", metavar="TEXT", help="What the model is told first.")
]


@computes
def chat(
    command: typer.Context,
    model: o.ModelIfAny = None,
    hf_repo: o.HfRepo = None,
    model_draft: o.ModelDraft = None,
    hf_repo_draft: o.HfRepoDraft = None,
    mtp: o.Mtp = None,
    system_prompt: System = None,
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
    speculation: o.SpeculationName = None,
    stock: o.Stock = False,
    repack: o.Repack = None,
    verbose: o.Verbose = False,
) -> None:
    """Talk with a model.

    Its own chat template is used. Enter sends, Alt+Enter begins a new line, Ctrl-C ends an answer, Ctrl-D the
    chat; /help lists what else there is. What was said stays in the context: only new tokens are processed,
    unless the template changes what was said. Reasoning is dimmed where the model marks it in a way that is
    known (<think>, [THINK], gpt-oss's channels, ...). What you type is kept for later chats, for you alone:
    ~/.cache/pyspac/chat-history.
    """
    target, draft = find_files(model, hf_repo, model_draft, hf_repo_draft)
    sampling = SamplingParams(temp=temp, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    options = RunOptions(
        model=target, draft=draft, mtp=mtp, n_predict=n_predict, n_ctx=ctx_size, n_threads=threads,
        cpu_range=cpu_range, n_gpu_layers=gpu_layers, sampling=sampling, cache=CacheSize(text=cache),
        ram=given_ram(ram, is_stock=stock), device=device, host_kernels=host_kernels, rpc=rpc,
        tensor_split=parse_tensor_split(tensor_split), spec_type=parse_spec_type(spec_type),
        draft_max=draft_max, speculation=speculation, stock=stock,
        repack=stock if repack is None else repack, verbose=verbose,
    )  # fmt: skip
    talk(with_saved(options, command), system_prompt, chat_template_file)


def talk(options: RunOptions, system: str | None = None, template_file: Path | None = None) -> None:
    """Load, then talk until the user leaves."""
    loading = Loading.of(options)
    template = ChatTemplate(loading.preflight.header, template_file)  # a wrong one is found before loading
    with Interrupt.watch() as interrupt, loading_bar(interrupt) as progress:
        session = Session(options, progress, loading)
    with session:
        say_what_has_no_effect(session)
        if template.is_fallback:
            error_console().print(
                "this model has no chat template: ChatML is used, as llama.cpp does; give its own with "
                "--chat-template-file",
                style="yellow",
            )
        ChatView(Conversation(session, template, system)).run()
