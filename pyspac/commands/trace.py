"""`pyspac trace`: record which experts a model's router selects, while it generates."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Annotated, Any, Final

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pyspac.commands import options as o
from pyspac.commands.common import (
    check_target,
    error_console,
    read_prompt,
    reports_errors,
)
from pyspac.commands.model_names import find_files
from pyspac.commands.own import open_server
from pyspac.commands.server_options import own_options
from pyspac.engine.attached import TRACE
from pyspac.errors import EXIT_INTERRUPTED, PyspacError, UsageError
from pyspac.lab.raw_trace import cut_off, read_passes
from pyspac.lab.recorder import ends_with, read_target, without_undecided
from pyspac.lab.trace import TokenStatus, Trace
from pyspac.lab.trace_builder import build_trace, trace_geometry
from pyspac.lab.trace_file import write_trace
from pyspac.model.draft_files import gate_layers
from pyspac.model.gguf_header import read_header
from pyspac.model.spec_types import NONE, parse_spec_type
from pyspac.server import log
from pyspac.server.options import ServeOptions, names_draft
from pyspac.speculation.manager import FIXED
from pyspac.talk.answer import Answer, complete
from pyspac.talk.client import Client, LostError, RefusedError
from pyspac.talk.interrupt import Interrupt

ADD: Final = "PYSPAC_TRACE_ADD"
_GREEDY: Final = ("--temp", "0")  # unless another one is given
_SERVER_ERROR: Final = "server_error"  # llama-server's name: the request was fine

Output = Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The trace to write, Parquet.")]
Logits = Annotated[
    bool,
    typer.Option("--logits", help="Record the router's scores of all experts, not only the chosen."),
]
Early = Annotated[
    bool,
    typer.Option("--early", help="Record each router applied 1, 2 and 3 layers early."),
]
DraftGate = Annotated[
    bool,
    typer.Option(
        "--draft-gate",
        help="Record the target's routers on the draft model's hidden states; the draft must be as wide as "
        "the target.",
    ),
]
NoDisplay = Annotated[bool, typer.Option("--no-display", help="Do not show the text.")]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is recorded beside experts and weights, of how many tokens, and what is shown."""

    logits: bool
    early: bool
    gates: Sequence[int] | None  # as read_target() has them
    n_predict: int
    shows_text: bool
    is_verbose: bool

    def variables(self, raw: IO[bytes]) -> dict[str, str]:
        """What makes the engine record, into a file that has no name."""
        named = {"logits": self.logits, "inputs": self.early, "draft-inputs": self.gates is not None}
        adds = ",".join(name for name, is_wanted in named.items() if is_wanted)
        return {TRACE: f"/proc/{os.getpid()}/fd/{raw.fileno()}", ADD: adds}


@reports_errors
def trace(
    command: typer.Context,
    output: Output,
    model_word: o.ModelWord = None,
    model: o.Model = None,
    hf_repo: o.HfRepo = None,
    model_draft: o.ModelDraft = None,
    mtp: o.Mtp = None,
    prompt: o.Prompt = None,
    file: o.PromptFile = None,
    n_predict: o.NPredict = 128,
    ctx_size: o.CtxSize = None,
    device: o.Device = "auto",
    rpc: o.Rpc = None,
    spec_type: o.SpecTypeName = None,
    draft_max: o.DraftMax = None,
    logits: Logits = False,
    early: Early = False,
    draft_gate: DraftGate = False,
    no_display: NoDisplay = False,
    verbose: o.Verbose = False,
) -> None:
    """Record a routing trace for `pyspac lab`.

    The model runs without a split and greedily; drafts are traced too. A row per token: step, position, id,
    whether it was drafted, accepted or rejected, and per layer its experts with their router weights. Other
    flags go to llama-server: --temp 1, --seed 7, --lora FILE ...
    """
    check_target("--output", output)
    file_of_model, _ = find_files(model, hf_repo, passed=command.args)
    options = _options(command.params | {"model": file_of_model, "hf_repo": None}, command.args)
    text = read_prompt(prompt, file)
    trace_geometry(file_of_model)  # a dense model is refused before it is loaded
    gates = _gates(options) if draft_gate else None
    wanted = Wanted(logits, early, gates, n_predict, not no_display, verbose)
    log.set_up("trace", as_json=False, is_quiet=not verbose)
    with Interrupt.watch() as interrupt, _raw_file(output.parent) as raw:
        options = replace(options, trace=wanted.variables(raw))
        recorded = record(options, text, wanted, raw, interrupt)
    write_trace(recorded, output)
    _say(recorded, output)
    if interrupt:
        raise typer.Exit(EXIT_INTERRUPTED)


def _options(given: dict[str, Any], passed: Sequence[str]) -> ServeOptions:
    """Of plain llama.cpp; drafts are as long as they are told to, whatever recording takes."""
    kind = parse_spec_type(given["spec_type"])
    has_draft = given["model_draft"] or given["mtp"] or names_draft(passed)
    drafts = bool(has_draft) if kind is None else kind != NONE
    more = {"stock": True, "speculation": FIXED if drafts else None}
    return own_options(given | more, (*_GREEDY, *passed))


def _gates(options: ServeOptions) -> Sequence[int]:
    """Raises UsageError where --draft-gate has nothing to record."""
    assert options.model is not None
    if options.draft is None:
        raise UsageError("--draft-gate records what a draft model's layers compute: name one with -md")
    target, draft = read_header(options.model), read_header(options.draft)
    return gate_layers("--draft-gate", target, draft, options.wanted_spec_type)


def _raw_file(folder: Path) -> IO[bytes]:
    """Where the trace will be, if there is room for a file; nothing is left of it however this ends."""
    try:
        return tempfile.TemporaryFile(dir=folder)
    except OSError:
        return tempfile.TemporaryFile()


def record(options: ServeOptions, prompt: str, wanted: Wanted, raw: IO[bytes], interrupt: Interrupt) -> Trace:
    """Load, generate with a progress bar, and return the trace of what the engine has written to `raw`."""
    assert options.model is not None
    with open_server(options, interrupt, verbose=wanted.is_verbose) as own:
        since = os.fstat(raw.fileno()).st_size  # before, llama-server tries what the model can do
        try:
            n_prompt = len(own.client.post("/tokenize", {"content": prompt, "add_special": True})["tokens"])
            answer = _generate(own.client, prompt, wanted, interrupt)
        except LostError as error:
            raise own.explain(error) from error
        except RefusedError as error:
            if error.kind != _SERVER_ERROR:
                raise
            words = own.last_words().replace(options.trace[TRACE], "the record of the routing")
            raise PyspacError(f"{error}{words}") from error
    is_whole = answer.stop_reason != "interrupted"
    passes = read_target(
        read_passes(raw, since, is_whole=is_whole),
        wants_logits=wanted.logits, wants_early=wanted.early, gates=wanted.gates,
    )  # fmt: skip
    if not is_whole:
        passes = without_undecided(passes, n_prompt)
        if not passes:
            raise KeyboardInterrupt
    elif passes and not ends_with(passes, n_prompt, answer.token_ids):
        raise cut_off(os.fstat(raw.fileno()).st_size)
    return build_trace(trace_geometry(options.model), passes, n_prompt)


def _generate(client: Client, prompt: str, wanted: Wanted, interrupt: Interrupt) -> Answer:
    """The prompt and all that follows is computed, in the one slot."""
    settings = {"n_predict": wanted.n_predict, "cache_prompt": False, "id_slot": 0}
    columns = (TextColumn("tokens"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=error_console(), transient=True) as bar:
        task = bar.add_task("tokens", total=wanted.n_predict if wanted.n_predict > 0 else None)

        def show(text: str) -> None:
            bar.advance(task)
            if wanted.shows_text:
                sys.stdout.write(text)
                sys.stdout.flush()

        answer = complete(client, prompt, show, interrupt, settings)
    if wanted.shows_text:
        sys.stdout.write("\n")
    return answer


def _say(trace: Trace, path: Path) -> None:
    count = {status: int((trace.status == status).sum()) for status in TokenStatus}
    error_console().print(
        f"wrote {path}: tokens: {count[TokenStatus.PROMPT]} of the prompt, "
        f"{count[TokenStatus.SAMPLED] + count[TokenStatus.ACCEPTED]} decoded, of which "
        f"{count[TokenStatus.ACCEPTED]} drafted; {count[TokenStatus.REJECTED]} rejected"
    )
