"""Whether llama.cpp can be trusted with a file, and a draft model with a target; from their headers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from pyspac.errors import ModelError
from pyspac.model.gguf_header import GgufHeader, read_header
from pyspac.model.not_gguf import check_is_model

# llama.cpp's rule for draft models (common/speculative.cpp): sizes may differ by padding, the first ids
# may be special
MAX_VOCAB_SIZE_DIFFERENCE: Final = 128
FIRST_COMPARED_TOKEN: Final = 5

# whole numbers, or one for each layer, that llama.cpp refuses as anything else
SIZES: Final = (
    "block_count", "embedding_length", "context_length", "expert_count", "expert_used_count",
    "expert_shared_count", "feed_forward_length", "expert_feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.kv_lora_rank",
    "rope.dimension_count", "nextn_predict_layers",
)  # fmt: skip
MAX_LAYERS: Final = 512  # LLAMA_MAX_LAYERS
MAX_SIZE: Final = (1 << 32) - 1


def check_model_file(path: Path) -> GgufHeader:
    """The header of a file that llama.cpp can be trusted to load, or ModelError."""
    header = read_header(path)
    check_is_model(path, header.metadata)
    if not header.architecture:
        raise ModelError(
            f"{path}: general.architecture is missing, so this is no model; give the model's own file"
        )
    if not header.tensors:
        raise ModelError(f"{path}: this file has no tensors (only a vocabulary?); give the model's own file")
    _check_whole(header)
    _check_types(header)
    _check_sizes(header)
    return header


def _check_whole(header: GgufHeader) -> None:
    """Raise ModelError if a tensor ends beyond its file."""
    sizes = {path: path.stat().st_size for path in {tensor.path for tensor in header.tensors}}
    for tensor in header.tensors:
        end, size = tensor.offset + tensor.n_bytes, sizes[tensor.path]
        if end > size:
            raise ModelError(
                f"{tensor.path}: this file is truncated: tensor {tensor.name} ends at byte {end}, the "
                f"file at byte {size}; download or copy it again"
            )


def _check_sizes(header: GgufHeader) -> None:
    """Raise ModelError for what cannot be a size, and for more layers than llama.cpp knows."""
    for key in SIZES:
        value = header.get(key, 0)
        numbers = value if isinstance(value, list) else [value]
        most = MAX_LAYERS if key == "block_count" else MAX_SIZE
        if not all(isinstance(number, int) and 0 <= number <= most for number in numbers):
            raise ModelError(
                f"{header.path}: {header.architecture}.{key} cannot be {value!r}; the header is damaged, "
                "download the file again"
            )


def _check_types(header: GgufHeader) -> None:
    """Raise ModelError for F64 tensors: ggml has no kernels for them and calls a null pointer."""
    for tensor in header.tensors:
        if tensor.type_name == "F64":
            raise ModelError(
                f"{tensor.path}: tensor {tensor.name} is F64, which llama.cpp cannot compute; "
                "convert the model again with F32, F16 or BF16"
            )


def check_same_vocab(target: GgufHeader, draft: GgufHeader) -> None:
    """Raise ModelError unless the draft's token ids mean the same to the target."""
    difference = _vocab_difference(target, draft)
    if difference is not None:
        raise ModelError(
            f"{draft.path}: the draft model has another vocabulary than the model: {difference}; "
            "use a draft of the same family, or leave -md out (--spec-type ngram needs no draft model)"
        )


def _vocab_difference(target: GgufHeader, draft: GgufHeader) -> str | None:
    for key in ("model", *_added_specials(target, draft)):
        ours, theirs = _tokenizer_values(key, target, draft)
        if ours != theirs:
            return f"tokenizer.ggml.{key} is {theirs} in the draft and {ours} in the model"
    tokens, draft_tokens = (values or [] for values in _tokenizer_values("tokens", target, draft))
    if abs(len(tokens) - len(draft_tokens)) > MAX_VOCAB_SIZE_DIFFERENCE:
        return f"{len(draft_tokens)} tokens in the draft and {len(tokens)} in the model"
    for i in range(FIRST_COMPARED_TOKEN, min(len(tokens), len(draft_tokens))):
        if tokens[i] != draft_tokens[i]:
            return f"token {i} is {draft_tokens[i]!r} in the draft and {tokens[i]!r} in the model"
    return None


def _added_specials(target: GgufHeader, draft: GgufHeader) -> list[str]:
    """The keys of the tokens that either model adds by itself; others may differ (base and chat)."""
    return [
        key
        for name in ("bos", "eos")
        if any(_tokenizer_values(f"add_{name}_token", target, draft))
        for key in (f"add_{name}_token", f"{name}_token_id")
    ]


def _tokenizer_values(key: str, *headers: GgufHeader) -> list[Any]:
    return [header.metadata.get(f"tokenizer.ggml.{key}") for header in headers]
