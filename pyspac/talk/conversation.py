"""A chat with a server: what the user says in, answers out. The server's slot keeps what both have said."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from pyspac.checks import check_int, check_range
from pyspac.errors import UsageError
from pyspac.talk.answer import Answer, OnText, chat
from pyspac.talk.client import TOO_LONG, Client, RefusedError
from pyspac.talk.interrupt import Interrupt

FULL: Final = 0.75  # of the context: what is left then is for the next question and its answer
MAX_SEED: Final = 2**32 - 1  # llama.cpp's; this one means a random seed
# what `/set` changes: llama-server's name of it, and its kind
SETTINGS: Final[dict[str, tuple[str, type]]] = {
    "temp": ("temperature", float),
    "top_k": ("top_k", int),
    "top_p": ("top_p", float),
    "min_p": ("min_p", float),
    "seed": ("seed", int),
}


def n_ctx_of(client: Client) -> int:
    """Tokens of a slot's context. Raises RefusedError or LostError."""
    with client.understood():
        return int(client.get("/props")["default_generation_settings"]["n_ctx"])


@dataclass(slots=True)
class Conversation:
    """The messages so far; `answers` are the turns'."""

    client: Client
    system: str | None = None
    n_predict: int = -1
    answers: list[Answer] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)  # changed ones, by llama-server's names
    n_forgotten: int = 0  # turns that the context had no room for
    _messages: list[dict[str, Any]] = field(default_factory=list)
    _props: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises LostError."""
        with self.client.understood():
            self._props = self.client.get("/props")["default_generation_settings"]
            _ = self.n_ctx

    @property
    def n_ctx(self) -> int:
        return int(self._props["n_ctx"])

    @property
    def n_held(self) -> int:
        """Tokens in the context after the last answer."""
        return self.answers[-1].n_prompt + self.answers[-1].n_tokens if self.answers else 0

    def ask(self, question: str, on_text: OnText, on_reasoning: OnText, interrupt: Interrupt) -> Answer:
        """The answer. A question that fails is forgotten, and raises RefusedError or LostError.

        The oldest turns are, too, where the context has no room for them and an answer.
        """
        kept = self._messages
        if self.n_held > FULL * self.n_ctx and len(kept) > 2:
            kept = _younger(kept)
        while True:
            try:
                messages = [*kept, {"role": "user", "content": question}]
                answer = self._ask(messages, on_text, on_reasoning, interrupt)
                break
            except RefusedError as error:
                if error.kind != TOO_LONG or not kept:
                    raise
                kept = _younger(kept)
        self.n_forgotten += (len(self._messages) - len(kept)) // 2
        if answer.stop_reason == "length" and answer.n_prompt + answer.n_tokens + 1 >= self.n_ctx:
            answer.stop_reason = "context"
        self._messages = [*messages, {"role": "assistant", "content": answer.text}]
        self.answers.append(answer)
        return answer

    def _ask(
        self, messages: list[dict[str, Any]], on_text: OnText, on_reasoning: OnText, interrupt: Interrupt
    ) -> Answer:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        settings = self.settings | ({} if self.n_predict < 0 else {"n_predict": self.n_predict})
        return chat(self.client, [*system, *messages], on_text, on_reasoning, interrupt, settings)

    def value(self, name: str) -> Any:
        """One of SETTINGS, as it is."""
        key, kind = SETTINGS[name]
        value = kind(self.settings.get(key, self._props["params"][key]))
        return -1 if name == "seed" and value == MAX_SEED else value

    def set(self, name: str, text: str) -> None:
        """Change one of SETTINGS. Raises ConfigError or UsageError."""
        if name not in SETTINGS:
            raise UsageError(f"{name} cannot be set: give one of {', '.join(SETTINGS)} or system")
        key, kind = SETTINGS[name]
        try:
            value = kind(text)
        except ValueError:
            wanted = "whole number" if kind is int else "number"
            raise UsageError(f"{name} needs a {wanted}: /set {name} {self.value(name)}") from None
        _check(name, value)
        self.settings[key] = value

    def set_system(self, system: str | None) -> None:
        """Begin again with another system message."""
        self.system = system
        self.clear()

    def clear(self) -> None:
        """Begin again."""
        self._messages.clear()
        self.answers.clear()
        self.n_forgotten = 0


def _younger(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The younger half of the turns, a question and its answer each: these are processed once more."""
    return messages[2 * -(-len(messages) // 4) :]


def _check(name: str, value: float) -> None:
    match name:
        case "temp":
            check_range(name, value, 0, 100)
        case "top_p" | "min_p":
            check_range(name, value, 0, 1)
        case "top_k":
            check_int(name, int(value), 0)
        case "seed":
            check_int(name, int(value), -1, MAX_SEED)
