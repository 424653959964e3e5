"""How text is split before byte-level BPE; imports nothing, so that writing a tokenizer needs no torch."""

from __future__ import annotations

from typing import Final

# The pre-tokenizer that llama.cpp calls "qwen2": contractions, words with one leading sign, single digits,
# runs of signs with the line ends after them, line ends, and white space up to the last blank.
QWEN2_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
