"""The terminal of a chat: reads lines, shows answers as they come, obeys /commands.

In: a `Conversation`. prompt_toolkit edits the lines and keeps their history, rich shows the answers; markdown
is left as the model wrote it, reasoning is dimmed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console

from pyspac.errors import PyspacError, UsageError
from pyspac.generate.chat import Conversation, Turn
from pyspac.generate.decode import Interrupt
from pyspac.generate.reasoning import Reasoning
from pyspac.generate.sampling import SamplingParams
from pyspac.server.warm_start import cache_folder

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

SETTINGS: Final = {"temp": float, "top_k": int, "top_p": float, "min_p": float, "seed": int}
HELP: Final = """\
/set              what can be set, and how it is
/set NAME VALUE   temp, top_k, top_p, min_p, seed; or system TEXT, which begins a new chat
/stats            what the answers took, and how full the context is
/clear            begin a new chat
/help             this
/exit             leave; Ctrl-D does too
Enter sends, Alt+Enter begins a new line; Ctrl-C ends an answer, and clears the line."""


class ChatView:
    """One chat on a terminal."""

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.console = Console(highlight=False)

    def run(self) -> None:
        """Until Ctrl-D or /exit, or a pipe's end."""
        for line in map(str.strip, self._typed() if sys.stdin.isatty() else sys.stdin):
            if line == "/exit":
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
            self._obey(line) if line.startswith("/") else self._answer(line)
        except PyspacError as error:
            self.console.print(str(error), style="red", markup=False)
        except KeyboardInterrupt:  # the second one of an answer
            self.console.print("\\[stopped]", style="dim")

    def _answer(self, question: str) -> None:
        thinks = Reasoning(self.conversation.begun_reasoning)

        def show(part: str, *, is_last: bool = False) -> None:
            for text, is_reasoning in thinks.feed(part, is_last=is_last):
                style = "dim" if is_reasoning else None
                self.console.print(text, end="", style=style, markup=False, soft_wrap=True)

        with Interrupt.watch() as interrupt:
            turn = self.conversation.ask(question, show, interrupt)
        show("", is_last=True)
        self.console.print()
        self._say_why_it_ended(turn)

    def _say_why_it_ended(self, turn: Turn) -> None:
        reason = turn.generation.stop_reason
        texts = {
            "interrupted": "[stopped]",
            "length": "[-n tokens are reached]",
            "context": "[the context is full: /clear begins a new chat, -c gives it more room]",
        }
        if reason in texts:
            self.console.print(texts[reason], style="dim", markup=False)

    # ---- commands

    def _obey(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        match name:
            case "/help":
                self.console.print(HELP, markup=False)
            case "/stats":
                self.console.print("\n".join(stats_lines(self.conversation)), markup=False)
            case "/clear":
                self.conversation.clear()
            case "/set":
                self._set(rest.strip())
            case _:
                raise UsageError(f"there is no {name}: /help lists the commands")

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        sampling = self.conversation.session.sampler.params
        if name == "system":
            self.conversation.set_system(value.strip() or None)
        elif name:
            self.conversation.session.set_sampling(_changed(sampling, name, value.strip()))
        else:
            shown = "  ".join(f"{field} {getattr(sampling, field):g}" for field in SETTINGS)
            self.console.print(f"{shown}\nsystem {self.conversation.system or 'none'}", markup=False)


def _changed(sampling: SamplingParams, name: str, value: str) -> SamplingParams:
    """Raises ConfigError or UsageError."""
    if name not in SETTINGS:
        raise UsageError(f"{name} cannot be set: give one of {', '.join(SETTINGS)} or system")
    number: Any = None
    with contextlib.suppress(ValueError):
        number = SETTINGS[name](value)
    if number is None:
        raise UsageError(f"{name} needs a number: /set {name} {getattr(sampling, name):g}")
    return replace(sampling, **{name: number})


def stats_lines(conversation: Conversation) -> list[str]:
    """A line per answer, and the context."""
    lines = []
    for i, turn in enumerate(conversation.turns, 1):
        metrics = turn.generation.metrics
        speed = "-" if metrics.tps is None else f"{metrics.tps:.1f} tokens/s"
        lines.append(
            f"answer {i}: {turn.n_processed} new tokens processed, {turn.n_kept} kept from before; "
            f"{metrics.n_tokens} generated, {speed}"
        )
    context = conversation.session.context
    n_held = context.n_past if conversation.turns else 0
    return [*lines, f"context: {n_held} of {context.n_ctx} tokens"]


def _new_prompt() -> PromptSession[str]:
    """A line editor with the history of former chats, where it can be kept."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings

    history: History = InMemoryHistory()
    with contextlib.suppress(OSError):
        cache_folder().mkdir(parents=True, exist_ok=True)
        path = cache_folder() / "chat-history"
        path.touch(mode=0o600)
        history = FileHistory(str(path))
    keys = KeyBindings()
    keys.add("enter")(lambda event: event.current_buffer.validate_and_handle())
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    return PromptSession(history=history, key_bindings=keys, multiline=True)
