"""Messages of a chat to the text that the model continues, by its own template: as llama-server does it.

llama.cpp's `common` runs the templates (jinja), through libspac: `spac_chat_template_*` in spac.h. What it
mends is mended here too: where a template takes no system message, that one begins the user's first one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from pyspac.errors import ConfigError, EngineError, ModelError
from pyspac.generate.encoding import utf8
from pyspac.model.gguf_header import GgufHeader

if TYPE_CHECKING:
    from pyspac.generate.vocab import Vocab

Role = Literal["system", "user", "assistant"]

INVALID_ARGUMENT: Final = 1  # SPAC_STATUS_INVALID_ARGUMENT
CHATML: Final = "chatml"  # what llama.cpp takes for a model that has none, by its name there


@dataclass(frozen=True, slots=True)
class Message:
    """What one of them said."""

    role: Role
    content: str


class ChatTemplate:
    """One template."""

    def __init__(self, header: GgufHeader, file: Path | None = None) -> None:
        """Of `file`, else the model's own, else ChatML. Raises ConfigError, or ModelError if it is none."""
        own = header.metadata.get("tokenizer.chat_template")
        self.is_fallback = file is None and own is None
        self.bos = header.metadata.get("tokenizer.ggml.bos_token_id")
        source = read_template(file) if file else CHATML if own is None else str(own)
        try:
            if not source.strip():
                raise EngineError(INVALID_ARGUMENT, "it is empty")
            if "\0" in source:
                raise EngineError(INVALID_ARGUMENT, "it holds zero bytes")
            self._chat = _open(source, _special(header, "bos"), _special(header, "eos"))
            if not self._apply([Message("user", "x")]).strip():
                raise EngineError(INVALID_ARGUMENT, "it makes no text of a message")
        except EngineError as error:
            raise ModelError(
                f"{file or header.path}: the chat template cannot be used ({error}); give another "
                "one with --chat-template-file, or complete plain text with pyspac run -p"
            ) from error

    def text(self, messages: Sequence[Message]) -> str:
        """All of them, and the beginning of the answer.

        Raises ModelError if the template refuses them, NotTextError for half of a character.
        """
        try:
            return self._apply(messages)
        except EngineError as error:  # one that took a message may refuse others
            raise ModelError(
                f"the chat template refuses what was said ({error}): say it otherwise, begin a new chat, or "
                "give another template with --chat-template-file"
            ) from error

    def _apply(self, messages: Sequence[Message]) -> str:
        from pyspac._native import check, ffi, lib  # late: --help needs no library

        for message in messages:
            utf8(message.content, "a message")
        text, n_bytes = ffi.new("char **"), ffi.new("int64_t *")
        rows = json.dumps([asdict(message) for message in messages])
        try:
            check(lib.spac_chat_template_apply(self._chat, rows.encode(), text, n_bytes))
        except EngineError as error:
            raise EngineError(error.status, _reason(error)) from error
        return bytes(ffi.buffer(text[0], n_bytes[0])).decode(errors="replace")

    def tokens(self, text: str, vocab: Vocab) -> list[int]:
        """Of a whole text, which may begin with BOS by itself: never two of them."""
        tokens = vocab.tokenize(text)
        return tokens[1:] if tokens[:2] == [self.bos, self.bos] else tokens


def _reason(error: EngineError) -> str:
    """What the template says, or llama.cpp of it, without the pieces of source before that."""
    said = error.text.rpartition("Error: ")[2].removeprefix("Jinja Exception: ")
    return "llama.cpp cannot read it as jinja" if said == "std::exception" else said


def _open(source: str, bos: str, eos: str) -> object:
    """The handle; it is closed with the last reference to it. Raises EngineError."""
    from pyspac._native import check, ffi, lib  # late, as above

    out = ffi.new("spac_chat_template **")
    try:
        check(lib.spac_chat_template_open(source.encode(), bos.encode(), eos.encode(), out))
    except EngineError as error:
        raise EngineError(error.status, _reason(error)) from error
    return ffi.gc(out[0], lib.spac_chat_template_close)


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
