"""A model's vocabulary: text to token ids."""

from __future__ import annotations

from typing import Any

from pyspac.forward.libllama import lib


class Vocab:
    """Text to token ids."""

    def __init__(self, model_ptr: int) -> None:
        self.ptr = lib.llama_model_get_vocab(model_ptr)
        self.n_tokens = int(lib.llama_vocab_n_tokens(self.ptr))

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids; `add_special`: BOS if the model wants it; `parse_special`: read "<|im_end|>" etc."""
        data = text.encode("utf-8")
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

    def is_eog(self, token: int) -> bool:
        """End of generation: EOS, end of turn and the like."""
        return bool(lib.llama_vocab_is_eog(self.ptr, token))
