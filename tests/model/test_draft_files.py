"""Heads of other models are refused by their headers, before llama.cpp meets a token that is new to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pyspac.errors import ModelError
from pyspac.model.draft_files import check_drafter
from pyspac.model.gguf_header import GgufHeader, read_header

TARGET = Path(__file__).parents[2] / "pyspac" / "models" / "demo-moe.gguf"


def head(architecture: str, n_tokens: int, **fields: Any) -> GgufHeader:
    values = {"block_count": 1, "target_layers": [1, 2, 3], "nextn_predict_layers": 1} | fields
    metadata = {f"{architecture}.{name}": value for name, value in values.items()}
    metadata |= {"general.architecture": architecture, "tokenizer.ggml.tokens": ["a"] * n_tokens}
    return GgufHeader(Path("head.gguf"), metadata, ())


@pytest.mark.parametrize(
    ("spec_type", "draft", "why"),
    [
        ("draft-eagle3", head("eagle3", 3071), "knows 3071 tokens, and demo-moe.gguf has 3072"),
        ("draft-eagle3", head("eagle3", 3072, block_count=0), "without layers"),
        ("draft-mtp", head("glm4moe", 3072), "of the architecture glm4moe, and demo-moe.gguf of qwen3moe"),
        ("ngram-simple,draft-eagle3", head("eagle3", 259), "knows 259 tokens"),
    ],
)
def test_heads_of_other_models(spec_type: str, draft: GgufHeader, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        check_drafter(spec_type, read_header(TARGET), draft)


@pytest.mark.parametrize("n_tokens", [0, 3072, 3200])
def test_heads_of_this_model(n_tokens: int) -> None:
    """Without a vocabulary of their own, or with the model's and what fills it up."""
    check_drafter("draft-eagle3", read_header(TARGET), head("eagle3", n_tokens))
