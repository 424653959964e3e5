"""Heads of other models are refused by their headers, before llama.cpp meets a token that is new to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pyspac.errors import ModelError, UsageError
from pyspac.model.draft_files import check_drafter, gate_layers
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


def model(n_layer: int, n_embd: int = 256, n_heads: int = 0) -> GgufHeader:
    sizes = {"block_count": n_layer + n_heads, "nextn_predict_layers": n_heads, "embedding_length": n_embd}
    return GgufHeader(
        Path("model.gguf"), {"general.architecture": "a"} | {f"a.{k}": v for k, v in sizes.items()}, ()
    )


@pytest.mark.parametrize(
    ("n_layer", "n_draft", "wanted"),
    [
        (4, 4, [0, 1, 2, 3]),
        (4, 2, [0, 0, 1, 1]),
        (4, 1, [0, 0, 0, 0]),
        (5, 3, [0, 0, 1, 1, 2]),
        (3, 6, [0, 2, 4]),
    ],
)
def test_a_layer_is_told_of_by_the_draft_s_at_the_same_depth(
    n_layer: int, n_draft: int, wanted: list[int]
) -> None:
    assert gate_layers("--draft-gate", model(n_layer), model(n_draft, n_heads=1), "draft") == wanted


def test_a_gate_of_a_draft_that_does_not_fit() -> None:
    with pytest.raises(
        UsageError, match=r"model.gguf has a width of 128, model.gguf of 256; .* --draft-gate out"
    ):
        gate_layers("--draft-gate", model(4), model(4, 128), "draft")
    with pytest.raises(UsageError, match="reads a draft model of --spec-type draft"):
        gate_layers("--draft-gate", model(4), model(1), "draft-eagle3")
