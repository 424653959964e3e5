"""`pyspac run`: what follows a prompt, from a llama-server of its own or from one that runs already."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from pyspac.commands import options as o
from pyspac.commands.chat import talk
from pyspac.commands.common import (
    check_json_target,
    error_console,
    read_prompt,
    reports_errors,
)
from pyspac.commands.grouped_help import MORE
from pyspac.commands.json_file import STDOUT, write_json
from pyspac.commands.own import Connection, connected
from pyspac.errors import EXIT_INTERRUPTED
from pyspac.scheduler.policy import DEFAULT_POLICY
from pyspac.talk.answer import Answer, complete
from pyspac.talk.client import Client
from pyspac.talk.interrupt import Interrupt

if TYPE_CHECKING:
    from pyspac.talk.figures import Figures

Chat = Annotated[
    bool, typer.Option("--chat", help="Treat the prompt as a message: apply the model's chat template.")
]
Explain = Annotated[
    bool,
    typer.Option(
        "--explain",
        help="Show how draft lengths were chosen, and why.",
        rich_help_panel=MORE,
    ),
]


@reports_errors
def run(
    command: typer.Context,
    model_word: o.ModelWord = None,
    model: o.Model = None,
    hf_repo: o.HfRepo = None,
    prompt: o.Prompt = None,
    file: o.PromptFile = None,
    chat: Chat = False,
    n_predict: o.NPredict = -1,
    ctx_size: o.CtxSize = None,
    server: o.Server = None,
    model_draft: o.ModelDraft = None,
    hf_repo_draft: o.HfRepoDraft = None,
    mtp: o.Mtp = None,
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
    explain: Explain = False,
    policy: o.Policy = DEFAULT_POLICY,
    predict: o.Predictors = o.DEFAULT_PREDICTORS,
    stock: o.Stock = False,
    json_file: o.JsonFile = None,
    verbose: o.Verbose = False,
) -> None:
    """Generate text after a prompt; without one, on a terminal, it is a chat.

    Other flags go to the llama-server that runs the model and ends with the command: --temp 0,
    --grammar-file FILE, --lora FILE ... Example: pyspac run MODEL.gguf -p "Once upon" -n 99
    """
    check_json_target(json_file)
    can_talk = json_file is None and sys.stdin.isatty() and sys.stdout.isatty()
    if prompt is None and file is None and can_talk:
        talk(command, n_predict=n_predict)
        return
    text = read_prompt(prompt, file)
    with Interrupt.watch() as interrupt, connected(command, interrupt) as connection:
        if chat:
            with interrupt.ends(connection.client):
                text = with_template(connection.client, text)
        out = sys.stderr if json_file == STDOUT else sys.stdout
        figures = connection.own.figures() if connection.own else None
        answer = answer_shown(connection.client, text, interrupt, out, n_predict, figures)
        show_result(connection, figures, answer, json_file, explains=explain)
    if answer.stop_reason == "interrupted":
        raise typer.Exit(EXIT_INTERRUPTED)


def with_template(client: Client, message: str) -> str:
    """The prompt that the model's chat template makes of a message."""
    messages = [{"role": "user", "content": message}]
    with client.understood():
        return str(client.post("/apply-template", {"messages": messages})["prompt"])


def answer_shown(
    client: Client,
    prompt: str,
    interrupt: Interrupt,
    out: TextIO,
    n_predict: int = -1,
    figures: Figures | None = None,
) -> Answer:
    """What follows `prompt`, written to `out` as it comes."""

    def show(text: str) -> None:
        out.write(text)
        out.flush()

    settings: dict[str, Any] = {} if n_predict < 0 else {"n_predict": n_predict}
    on_first = figures.after_prompt if figures else (lambda: None)
    answer = complete(client, prompt, show, interrupt, settings, on_first)
    show("\n")
    return answer


def show_result(
    connection: Connection, figures: Figures | None, answer: Answer, json_file: str | None, *, explains: bool
) -> None:
    from pyspac.talk.report import answer_dict, print_decisions, print_table, run_dict  # loads numpy

    console, own = error_console(), connection.own
    if answer.stop_reason == "context":
        console.print(
            f"stopped: the context is full ({answer.n_prompt + answer.n_tokens} tokens of prompt and text); "
            "a larger one with -c, up to the one that the model was trained with (-c 0)",
            style="yellow",
        )
    console.print()
    print_table(console, answer, own, figures, connection.defaults)
    if explains and own is not None:
        print_decisions(console, own)
    if json_file is None:
        return
    if own is None or figures is None:
        write_json(json_file, {"mode": "server", "server": connection.client.address, **answer_dict(answer)})
    else:
        write_json(json_file, run_dict(own, figures, answer, with_decisions=explains))
