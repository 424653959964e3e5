"""A model's vocabulary: text to token ids and back."""

from __future__ import annotations

import codecs
import ctypes
from collections.abc import Sequence
from typing import Any

from pyspac.generate.encoding import utf8
from pyspac.generate.libllama import lib


class Vocab:
    """Text to token ids and back."""

    def __init__(self, model_ptr: int) -> None:
        self.ptr = lib.llama_model_get_vocab(model_ptr)
        self.n_tokens = int(lib.llama_vocab_n_tokens(self.ptr))
        self._piece_buffer = ctypes.create_string_buffer(256)

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids; `add_special`: BOS if the model wants it; `parse_special`: read "<|im_end|>" etc.

        Raises NotTextError for half of a character.
        """
        data = utf8(text, "the text")
        tokens = (lib.llama_token * (len(data) + 8))()
        n = self._tokenize_into(tokens, data, add_special, parse_special)
        if n < 0:  # more tokens than bytes
            tokens = (lib.llama_token * -n)()
            n = self._tokenize_into(tokens, data, add_special, parse_special)
        return list(tokens[:n])

    def _tokenize_into(self, tokens: Any, data: bytes, add_special: bool, parse_special: bool) -> int:
        """The number of tokens; negative: so many would be needed."""
        return int(
            lib.llama_tokenize(self.ptr, data, len(data), tokens, len(tokens), add_special, parse_special)
        )

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of one token, maybe half a character; control tokens are empty unless `special`."""
        n = lib.llama_token_to_piece(self.ptr, token, self._piece_buffer, len(self._piece_buffer), 0, special)
        if n < 0:
            self._piece_buffer = ctypes.create_string_buffer(-n)
            n = lib.llama_token_to_piece(self.ptr, token, self._piece_buffer, -n, 0, special)
        return self._piece_buffer.raw[:n]

    def detokenize(self, tokens: Sequence[int]) -> str:
        stream = TextStream(self)
        return "".join(map(stream.feed, tokens)) + stream.finish()

    def is_eog(self, token: int) -> bool:
        """End of generation: EOS, end of turn and the like."""
        return bool(lib.llama_vocab_is_eog(self.ptr, token))


class TextStream:
    """Tokens to text as they come; a character cut in two by the tokeniser is held back until it is whole."""

    def __init__(self, vocab: Vocab, tags: Sequence[str] = ()) -> None:
        """`tags`: texts to show also where they are control tokens, which have no text else."""
        self._vocab = vocab
        tokens = {token for tag in tags for token in vocab.tokenize(tag, add_special=False)}
        self._shown = {token for token in tokens if not vocab.piece(token)}
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        return self._decoder.decode(self._vocab.piece(token, special=token in self._shown))

    @property
    def has_control_tags(self) -> bool:
        """Whether any of `tags` is written with control tokens."""
        return bool(self._shown)

    def finish(self) -> str:
        """What is left: U+FFFD if the text ends inside a character."""
        return self._decoder.decode(b"", final=True)
