"""A chat with a model: what the user says in, answers out; the context keeps what both of them said.

The model's own template turns the messages into text (jinja, as llama-cpp-python runs it). Of a turn's text
only what is new is processed: tokens that are in the context stay there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from pyspac.errors import ConfigError, ModelError
from pyspac.generate.decode import Generation, Interrupt
from pyspac.generate.reasoning import TAGS, end_of_begun, without_reasoning
from pyspac.model.gguf_header import GgufHeader

if TYPE_CHECKING:
    from pyspac.generate.session import Session
    from pyspac.generate.vocab import Vocab

Role = Literal["system", "user", "assistant"]

# what llama.cpp takes for a model that has none (common/chat.cpp)
CHATML: Final = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


@dataclass(frozen=True, slots=True)
class Message:
    """What one of them said."""

    role: Role
    content: str


class ChatTemplate:
    """Messages to the text that the model continues."""

    def __init__(self, header: GgufHeader, file: Path | None = None) -> None:
        """Of `file`, else the model's own, else ChatML. Raises ConfigError, or ModelError if it is none."""
        import pyspac._native  # noqa: F401  before the bindings: it tells them where libllama is

        from llama_cpp.llama_chat_format import Jinja2ChatFormatter  # isort: skip

        own = header.metadata.get("tokenizer.chat_template")
        self.is_fallback = file is None and own is None
        self.bos = header.metadata.get("tokenizer.ggml.bos_token_id")
        source = read_template(file) if file else CHATML if own is None else str(own)
        try:
            self._formatter = Jinja2ChatFormatter(source, _special(header, "eos"), _special(header, "bos"))
            if not self._render([Message("user", "x")]).strip():
                raise ValueError("it makes no text of a message")
        except Exception as error:  # jinja has many, and a template raises its own
            raise ModelError(
                f"{file or header.path}: the chat template cannot be used ({error}); give another one with "
                "--chat-template-file, or complete plain text with pyspac run -p"
            ) from error

    def text(self, messages: Sequence[Message]) -> str:
        """All of them, and the beginning of the answer. Raises ModelError if the template refuses them."""
        try:
            return self._render(messages)
        except Exception as error:  # as above: one that took a message may refuse others
            raise ModelError(
                f"the chat template refuses what was said ({error}): say it otherwise, begin a new chat, or "
                "give another template with --chat-template-file"
            ) from error

    def check_system(self, system: str | None) -> None:
        """Raise ModelError if the template takes no such message: many models know none."""
        if system is None:
            return
        try:
            self._render([Message("system", system), Message("user", "x")])
        except Exception as error:
            raise ModelError(
                f"this model's chat template takes no system message ({error}): leave it out (-sys, "
                "/set system), or give another template with --chat-template-file"
            ) from error

    def _render(self, messages: Sequence[Message]) -> str:
        rows = [{"role": message.role, "content": message.content} for message in messages]
        return str(self._formatter(messages=rows).prompt)

    def tokens(self, text: str, vocab: Vocab) -> list[int]:
        """Of a whole text, which may begin with BOS by itself: never two of them."""
        tokens = vocab.tokenize(text)
        return tokens[1:] if tokens[:2] == [self.bos, self.bos] else tokens


def _special(header: GgufHeader, name: str) -> str:
    """The text of a special token; "" if there is none."""
    tokens = header.metadata.get("tokenizer.ggml.tokens") or []
    token = header.metadata.get(f"tokenizer.ggml.{name}_token_id")
    return str(tokens[token]) if token is not None and 0 <= token < len(tokens) else ""


def read_template(file: Path) -> str:
    """Raises ConfigError."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        wanted = f"a text file with a jinja template in it ({error})"
        raise ConfigError("--chat-template-file", str(file), wanted) from error


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
        """Begin again with another system message. Raises ModelError if the template takes none."""
        self.template.check_system(system)
        self.system = system
        self.clear()

    def clear(self) -> None:
        """Begin again; the context is freed by the next question."""
        self._messages.clear()
        self.turns.clear()
        self._text, self._tokens = "", []
