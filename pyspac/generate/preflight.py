"""Checks of the input before llama.cpp sees it, so that bad input gives a clear message and not a crash.

In: `RunOptions` and the chosen device. Out: a `Preflight`, the headers of the files and what follows from
them. Each check raises an error with exit code 2; nothing is written and no weight is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pyspac.engine.devices import Device
from pyspac.errors import ConfigError, ModelError
from pyspac.generate.options import DEFAULT_N_CTX, MIB, RunOptions
from pyspac.model.geometry import MoeGeometry, read_geometry
from pyspac.model.gguf_header import GgufHeader, read_header

# llama.cpp's rule for draft models (common/speculative.cpp): sizes may differ by padding, the first ids
# may be special
MAX_VOCAB_SIZE_DIFFERENCE: Final = 128
FIRST_COMPARED_TOKEN: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """What is known about a run before anything is loaded."""

    geometry: MoeGeometry
    draft: GgufHeader | None
    n_ctx: int


def check_run(options: RunOptions, device: Device) -> Preflight:
    """All checks that need the files' headers and the device only."""
    header = check_model_file(options.model)
    geometry = read_geometry(header)
    if device.is_cpu and options.n_gpu_layers not in (None, 0):
        raise ConfigError(
            "-ngl", options.n_gpu_layers, "0, as the device is the CPU; or choose another --device"
        )
    if not options.stock:
        _check_can_split(options, geometry, device)
    draft = None
    if options.draft is not None:
        draft = check_model_file(options.draft)
        check_same_vocab(header, draft)
    return Preflight(geometry=geometry, draft=draft, n_ctx=_choose_n_ctx(options.n_ctx, geometry))


def check_model_file(path: Path) -> GgufHeader:
    """The header of a file that llama.cpp can be trusted to load, or ModelError."""
    header = read_header(path)
    if not header.architecture:
        raise ModelError(
            f"{path}: general.architecture is missing, so this is no model; give the model's own file"
        )
    if not header.tensors:
        raise ModelError(f"{path}: no tensors (a vocabulary only?); give the model's own file")
    _check_whole(header)
    _check_types(header)
    return header


def _check_whole(header: GgufHeader) -> None:
    """Raise ModelError if a tensor ends beyond its file."""
    sizes = {path: path.stat().st_size for path in {tensor.path for tensor in header.tensors}}
    for tensor in header.tensors:
        end, size = tensor.offset + tensor.n_bytes, sizes[tensor.path]
        if end > size:
            raise ModelError(
                f"{tensor.path}: truncated: tensor {tensor.name} ends at byte {end}, the file has {size}; "
                "download or copy it again"
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


def _check_can_split(options: RunOptions, geometry: MoeGeometry, device: Device) -> None:
    if not geometry.is_moe:
        raise ModelError(
            f"{options.model}: a dense model ({geometry.architecture}), it has no experts to split; "
            "run it with --stock, or give a Mixture-of-Experts model"
        )
    n_bytes = options.cache.n_bytes(geometry.experts_bytes)
    if n_bytes is None or options.is_host_only:
        return
    largest = max(layer.expert_bytes for layer in geometry.moe_layers)
    if n_bytes < largest:
        raise ConfigError("--cache", options.cache.text, f"at least one expert, {largest / MIB:.2f} MiB")
    if n_bytes > device.memory_free:
        raise ConfigError(
            "--cache",
            options.cache.text,
            f"at most the {device.memory_free / MIB:.0f} MiB that are free on {device.name} "
            f"({n_bytes / MIB:.0f} MiB were asked for)",
        )


def _choose_n_ctx(wanted: int | None, geometry: MoeGeometry) -> int:
    """The context in tokens; 0 asks for the model's own."""
    n_train = geometry.n_ctx_train or DEFAULT_N_CTX
    if wanted is None:
        return min(n_train, DEFAULT_N_CTX)
    if wanted > n_train:
        raise ConfigError(
            "-c", wanted, f"at most {n_train}, the context that the model was trained with (0 chooses it)"
        )
    return wanted or n_train
