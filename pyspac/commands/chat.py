"""`pyspac chat`: a conversation in a terminal."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated

import typer

from pyspac.commands import options as o
from pyspac.commands.chat_view import ChatView
from pyspac.commands.common import reports_errors
from pyspac.commands.own import connected
from pyspac.talk.conversation import Conversation
from pyspac.talk.interrupt import Interrupt

System = Annotated[
    str | None, typer.Option("-sys", "--system-prompt", metavar="TEXT", help="The system prompt.")
]


@reports_errors
def chat(
    command: typer.Context,
    model_word: o.ModelWord = None,
    model: o.Model = None,
    hf_repo: o.HfRepo = None,
    server: o.Server = None,
    model_draft: o.ModelDraft = None,
    hf_repo_draft: o.HfRepoDraft = None,
    mtp: o.Mtp = None,
    system_prompt: System = None,
    n_predict: o.NPredict = -1,
    ctx_size: o.CtxSize = None,
    cpu_range: o.CpuRange = None,
    cache: o.Cache = "auto",
    ram: o.Ram = None,
    lossy: o.Lossy = None,
    max_kl: o.MaxKl = None,
    device: o.Device = "auto",
    host_kernels: o.HostKernels = "auto",
    rpc: o.Rpc = None,
    spec_type: o.SpecTypeName = None,
    draft_max: o.DraftMax = None,
    speculation: o.SpeculationName = None,
    stock: o.Stock = False,
    verbose: o.Verbose = False,
) -> None:
    """Talk with a model.

    Enter sends, Alt+Enter starts a new line, Ctrl-C ends an answer, Ctrl-D the chat; /help lists the rest.
    Other flags go to the llama-server that runs the model: --temp 0.2, --chat-template-file FILE ...
    Reasoning is dimmed. A full context forgets the oldest turns. Your lines are kept for later chats, for
    you only, in ~/.cache/pyspac/chat-history.
    """
    talk(command, system_prompt, n_predict)


def talk(command: typer.Context, system: str | None = None, n_predict: int = -1) -> None:
    """Load, then talk until the user leaves."""
    with ExitStack() as stack:
        with Interrupt.watch() as interrupt:
            connection = stack.enter_context(connected(command, interrupt))
        ChatView(Conversation(connection.client, system, n_predict)).run()
