"""The terminal of a chat: reads lines, shows answers as they come, obeys /commands.

In: a `Conversation`. prompt_toolkit edits the lines and keeps their history, rich shows the answers; markdown
is left as the model wrote it, reasoning is dimmed, and tool calls are shown, not carried out.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from rich.console import Console

from pyspac.engine.step import StepTotals
from pyspac.errors import PyspacError, UsageError
from pyspac.server.model_identity import cache_folder
from pyspac.talk.answer import Answer
from pyspac.talk.client import LostError
from pyspac.talk.conversation import SETTINGS, Conversation
from pyspac.talk.interrupt import Interrupt

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

EXITS: Final = (["/exit"], ["/quit"], ["/bye"])
HELP: Final = """\
/set              what can be set, and to what it is set
/set NAME VALUE   temp, top_k, top_p, min_p, seed; or system TEXT, which begins a new chat
/stats            what the answers took, and how full the context is
/clear            begin a new chat
/help             this
/exit             leave; Ctrl-D does too
//TEXT            a message that begins with /
Enter sends, Alt+Enter begins a new line; Ctrl-C ends an answer, and clears the line."""


class ChatView:
    """One chat on a terminal."""

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.console = Console(highlight=False)

    def run(self) -> None:
        """Until Ctrl-D or /exit, or a pipe's end."""
        for line in map(str.strip, self._typed() if sys.stdin.isatty() else sys.stdin):
            if line.split(maxsplit=1)[:1] in EXITS:
                return
            if line:
                self._say_errors(line)

    def _typed(self) -> Iterator[str]:
        """What is typed, until Ctrl-D."""
        prompt = _new_prompt()
        self.console.print("Enter sends, /help shows what else there is, Ctrl-D leaves.", style="dim")
        while True:
            try:
                yield str(prompt.prompt("> "))
            except KeyboardInterrupt:  # of the line
                continue
            except EOFError:
                return

    def _say_errors(self, line: str) -> None:
        try:
            if line.startswith("/") and not line.startswith("//"):
                self._obey(line)
            else:
                self._answer(line.removeprefix("/"))
        except LostError:
            raise
        except PyspacError as error:
            self.console.print(str(error), style="red", markup=False)
        except KeyboardInterrupt:  # the second one of an answer
            self.console.print("\\[stopped]", style="dim")

    def _answer(self, question: str) -> None:
        def show(text: str, style: str | None = None) -> None:
            self.console.print(text, end="", style=style, markup=False, soft_wrap=True)

        def show_reasoning(text: str) -> None:
            show(text, "dim")

        n_forgotten = self.conversation.n_forgotten
        with Interrupt.watch() as interrupt:
            answer = self.conversation.ask(question, show, show_reasoning, interrupt)
        self.console.print()
        if self.conversation.n_forgotten and not n_forgotten:
            self._confirm("the context is full: the oldest turns are forgotten; a larger one with -c")
        for call in answer.tool_calls:
            self._confirm(f"calls {call['name']}({call['arguments']})")
        self._say_why_it_ended(answer)

    def _say_why_it_ended(self, answer: Answer) -> None:
        texts = {
            "interrupted": "[stopped]",
            "length": "[-n tokens are reached]",
            "context": "[the context is full: the answer ends here; a larger one with -c]",
        }
        if answer.stop_reason in texts:
            self.console.print(texts[answer.stop_reason], style="dim", markup=False)

    # ---- commands

    def _obey(self, line: str) -> None:
        name, rest = (*line.split(maxsplit=1), "")[:2]
        match name:
            case "/help":
                self.console.print(HELP, markup=False)
            case "/stats":
                self.console.print("\n".join(stats_lines(self.conversation)), markup=False)
            case "/clear":
                self.conversation.clear()
                self._confirm("a new chat begins")
            case "/set":
                self._set(rest)
            case _:
                raise UsageError(f"there is no {name}: /help lists the commands")

    def _set(self, text: str) -> None:
        name, value = (*text.split(maxsplit=1), "", "")[:2]
        if name == "system":
            self.conversation.set_system(value or None)
            self._confirm(f"system is {value or 'none'}, and a new chat begins")
        elif name:
            self.conversation.set(name, value)
            self._confirm(f"{name} is {self._value(name)}")
        else:
            shown = "  ".join(f"{field} {self._value(field)}" for field in SETTINGS)
            self.console.print(f"{shown}\nsystem {self.conversation.system or 'none'}", markup=False)

    def _value(self, name: str) -> str:
        value = self.conversation.value(name)
        return str(value) if isinstance(value, int) else f"{value:g}"

    def _confirm(self, text: str) -> None:
        self.console.print(f"[{text}]", style="dim", markup=False)


def stats_lines(conversation: Conversation) -> list[str]:
    """A line per answer, and the context."""
    lines = []
    for i, answer in enumerate(conversation.answers, 1):
        speed = "-" if answer.tps is None else f"{answer.tps:.1f} tokens/s"
        lines.append(
            f"answer {i}: {answer.n_prompt - answer.n_cached} new tokens processed, {answer.n_cached} kept "
            f"from before; {answer.n_tokens} generated, {speed}{_drafts(answer.totals)}"
        )
    n = conversation.n_forgotten
    gone = f"; turns that are forgotten: {n}" if n else ""
    return [*lines, f"context: {conversation.n_held} of {conversation.n_ctx} tokens{gone}"]


def _drafts(totals: StepTotals) -> str:
    """What of it was drafted; "" without a drafter, and where nothing was drafted."""
    if totals.n_draft == 0:
        return ""
    return f"; {totals.n_draft} drafted, {totals.n_accepted} of them accepted"


def _new_prompt() -> PromptSession[str]:
    """A line editor with the history of former chats, where it can be kept."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings

    class KeptHistory(FileHistory):
        def store_string(self, string: str) -> None:
            with contextlib.suppress(OSError):  # the disk is full: this line is not kept
                super().store_string(string)

    history: History = InMemoryHistory()
    with contextlib.suppress(OSError):
        cache_folder().mkdir(parents=True, exist_ok=True)
        path = cache_folder() / "chat-history"
        path.touch(mode=0o600)
        if path.is_file():  # a device may be read for ever
            with path.open("a+b"):  # or it cannot be read and written
                history = KeptHistory(str(path))
    keys = KeyBindings()
    keys.add("enter")(lambda event: event.current_buffer.validate_and_handle())
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    return PromptSession(history=history, key_bindings=keys, multiline=True)
