"""Text to UTF-8, as llama.cpp reads it."""

from __future__ import annotations

from typing import Final

from pyspac.errors import PyspacError

N_SHOWN: Final = 20  # characters around what is no text


class NotTextError(PyspacError):
    """A string that no text has: with half of a character in it."""

    exit_code = 2


def utf8(text: str, what: str) -> bytes:
    """The bytes of `text`. Raises NotTextError, which calls it `what`, for a surrogate."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        before, code = text[max(0, error.start - N_SHOWN) : error.start], ord(text[error.start])
        raise NotTextError(
            f"{what} has half of a character, U+{code:04X}, behind {before!a}: give it as UTF-8, which it "
            "was not, most likely"
        ) from error
