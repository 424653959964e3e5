"""A chat with a model: what the user says in, answers out; the context keeps what both of them said.

Of a turn's text only what is new is processed: tokens that are in the context stay there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pyspac.generate.chat_template import ChatTemplate, Message
from pyspac.generate.decode import Generation, Interrupt
from pyspac.generate.reasoning import TAGS, end_of_begun, without_reasoning

if TYPE_CHECKING:
    from pyspac.generate.session import Session


@dataclass(frozen=True, slots=True)
class Turn:
    """What one answer took."""

    generation: Generation
    text: str

    @property
    def n_processed(self) -> int:
        """Tokens of the prompt that were new."""
        return self.generation.metrics.n_prompt - self.n_kept

    @property
    def n_kept(self) -> int:
        """Tokens of the prompt that were in the context."""
        return self.generation.metrics.n_cached


@dataclass(slots=True)
class Conversation:
    """The messages so far; `turns` are the answers'."""

    session: Session
    template: ChatTemplate
    system: str | None = None
    turns: list[Turn] = field(default_factory=list)
    _messages: list[Message] = field(default_factory=list)
    _text: str = ""  # what the context's tokens stand for
    _tokens: list[int] = field(default_factory=list)

    def ask(
        self,
        question: str,
        on_text: Callable[[str], None] = lambda text: None,
        interrupt: Interrupt | None = None,
    ) -> Turn:
        """The answer; `on_text` gets it as it comes. A question that fails is forgotten, and raises."""
        messages = [*self._messages, Message("user", question)]
        text, tokens = self._prompt(messages)
        stream = self.session.text_stream(TAGS)  # some models' are control tokens
        parts: list[str] = []

        def show(part: str) -> None:
            parts.append(part)
            on_text(part)

        generation = self.session.generate(tokens, lambda token: show(stream.feed(token)), interrupt)
        show(stream.finish())
        answer = "".join(parts)
        said = without_reasoning(answer, self.begun_reasoning) if stream.has_control_tags else answer
        self._messages = [*messages, Message("assistant", said)]
        is_kept = said == answer  # else the template begins anew with what was said
        self._text = text + answer if is_kept else ""
        self._tokens = tokens + generation.token_ids if is_kept else []
        self.turns.append(Turn(generation, answer))
        return self.turns[-1]

    @property
    def begun_reasoning(self) -> str:
        """The tag that ends what the template has begun, so that the answer does not; "": nothing."""
        return end_of_begun(self.template.text([Message("user", "x")]))

    def _prompt(self, messages: Sequence[Message]) -> tuple[str, list[int]]:
        """The text of all messages and its tokens: those of the context where the text begins alike.

        An answer's text may be cut into tokens in another way than it was generated.
        """
        system = [] if self.system is None else [Message("system", self.system)]
        text = self.template.text([*system, *messages])
        if self._text and text.startswith(self._text):
            rest = self.session.model.vocab.tokenize(text[len(self._text) :], add_special=False)
            return text, self._tokens + rest
        return text, self.template.tokens(text, self.session.model.vocab)

    def set_system(self, system: str | None) -> None:
        """Begin again with another system message."""
        self.system = system
        self.clear()

    def clear(self) -> None:
        """Begin again; the context is freed by the next question."""
        self._messages.clear()
        self.turns.clear()
        self._text, self._tokens = "", []
