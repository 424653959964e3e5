"""A drafter trained into a model: a LoRA adapter that acts only on mask tokens, as its file describes it.

In: a GGUF adapter made by `scripts/convert_mtp_to_gguf.py`. Out: an `MtpAdapter`. The file is a LoRA adapter
as llama.cpp loads it; what llama.cpp does not know stands in the keys `pyspac.mtp.*`, and all of them are
here, for the writer too.

One of its pairs changes `token_embd.weight`: the masks' embeddings. A tied output head is a tensor of the
same name, but that pair is not for it (its two matrices lie the other way round): a graph applies it where
embeddings are looked up, and nowhere else.

Masks and gates: Samragh et al., arXiv 2507.11851, section 3.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyspac.errors import ModelError
from pyspac.model.gguf_header import GgufHeader, read_header

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# where llama.cpp's graphs have a row for each token of the batch: hooks/0005 gates them
_GATED_TENSOR: Final = re.compile(r"(blk\.\d+\.attn_(q|k|v|qkv|output)|token_embd)\.weight\.lora_[ab]")
N_MASKS: Final = "pyspac.mtp.n_masks"
MASK_IDS: Final = "pyspac.mtp.mask_ids"
BASE: Final = "pyspac.mtp.base"
# of the sampler; without the first there is none
SAMPLER_RANK: Final = "pyspac.mtp.sampler.rank"
SAMPLER_TOP: Final = "pyspac.mtp.sampler.top"
SAMPLER_PREVIOUS: Final = "pyspac.mtp.sampler.previous"
SAMPLER_NEXT: Final = "pyspac.mtp.sampler.next"
N_TOP: Final = 32  # candidates of a mask that a sampler is trained on, and that its file names


@dataclass(frozen=True, slots=True, eq=False)
class MtpSampler:
    """Makes the drafts of a group fit each other: scores of token pairs, of a low rank.

    `previous` and `next` are [n_vocab, rank] float16: the pair (a, b) scores previous[a] . next[b].
    """

    n_top: int  # so many of a mask's likeliest tokens are scored; the others are no candidates
    previous: NDArray[np.float16]
    next: NDArray[np.float16]

    def rerank(self, logits: NDArray[np.float32], previous: int) -> int:
        """The draft of a mask behind the token `previous`; `logits` are the mask's, [n_vocab], unchanged."""
        import numpy as np  # loaded here: it takes longer than the rest of a command

        n_top = min(self.n_top, len(logits))
        top = np.argpartition(logits, -n_top)[-n_top:]
        pairs = self.next[top].astype(np.float32) @ self.previous[previous].astype(np.float32)
        return int(top[np.argmax(logits[top] + pairs)])


@dataclass(frozen=True, slots=True, eq=False)
class MtpAdapter:
    """What a drafting loop has to know of an adapter; the matrices are llama.cpp's to load."""

    n_masks: int
    mask_ids: tuple[int, ...]  # [n_masks]: mask i of a group (from 1) is the token mask_ids[i - 1]
    base: str  # base_id of the model that it was trained on
    sampler: MtpSampler | None


def base_id(model: GgufHeader | str | Path) -> str:
    """What a model is known by whatever its quantisation: 64 hexadecimal digits.

    `model` is its file or the header of it.

    SHA-256 of architecture, layers, width and vocabulary. A fine-tuned model has the id of its base: an
    adapter of either works with both, with worse drafts and the same text. Raises ModelError as `read_header`
    does, and for a file without a vocabulary.
    """
    header = _header(model)
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    sizes = [header.get(key) for key in ("block_count", "embedding_length")]
    if not tokens or None in sizes:
        raise ModelError(
            f"{header.path}: this file has no vocabulary or no sizes; give the model's own GGUF file"
        )
    parts = [header.architecture, *map(str, sizes), *tokens]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def read_adapter(adapter: GgufHeader | str | Path) -> MtpAdapter:
    """What the header of an adapter says; `adapter` is its file or that header.

    Raises ModelError: no GGUF, no adapter, an adapter without masks, values that contradict each other.
    """
    header = _header(adapter)
    if header.metadata.get("general.type") != "adapter" and header.tensors:
        raise ModelError(
            f"{header.path}: this is a model or a head, and --mtp takes an adapter with mask tokens; give a "
            "draft or a head with -md, and what it is with --spec-type (draft-mtp, draft-eagle3)"
        )
    if N_MASKS not in header.metadata:
        raise ModelError(
            f"{header.path}: this is no adapter with mask tokens; make one with scripts/train_mtp.py and "
            "scripts/convert_mtp_to_gguf.py"
        )
    n_masks, mask_ids = _whole(header, N_MASKS), tuple(_whole_list(header, MASK_IDS))
    if n_masks < 1 or len(set(mask_ids)) != n_masks or len(mask_ids) != n_masks or min(mask_ids) < 0:
        raise ModelError(
            f"{header.path}: {N_MASKS} is {n_masks} and {MASK_IDS} is {list(mask_ids)}, where each mask has "
            "an id of its own; convert the adapter again"
        )
    return MtpAdapter(n_masks, mask_ids, str(_get(header, BASE)), _read_sampler(header))


def _header(file: GgufHeader | str | Path) -> GgufHeader:
    return file if isinstance(file, GgufHeader) else read_header(file)


def _read_sampler(header: GgufHeader) -> MtpSampler | None:
    if SAMPLER_RANK not in header.metadata:
        return None
    rank, n_top = _whole(header, SAMPLER_RANK), _whole(header, SAMPLER_TOP)
    previous, after = (_halves(header, key) for key in (SAMPLER_PREVIOUS, SAMPLER_NEXT))
    fits = rank > 0 and n_top > 0 and 0 < previous.size == after.size and previous.size % rank == 0
    if not fits:
        raise ModelError(
            f"{header.path}: a sampler of rank {rank} and {n_top} candidates cannot have {previous.size} and "
            f"{after.size} numbers; convert the adapter again"
        )
    return MtpSampler(n_top, previous.reshape(-1, rank), after.reshape(-1, rank))


def _halves(header: GgufHeader, key: str) -> NDArray[np.float16]:
    """GGUF has no arrays of 16-bit floats in its metadata, so they are stored as 16-bit integers."""
    import numpy as np

    bits = np.asarray(_whole_list(header, key), np.int64)
    if bits.size and not 0 <= bits.min() <= bits.max() <= np.iinfo(np.uint16).max:
        raise _wrong(header, key, "16-bit integers")
    halves = bits.astype(np.uint16).view(np.float16)
    if not np.isfinite(halves).all():
        raise _wrong(header, key, "finite numbers")
    return halves


def _whole(header: GgufHeader, key: str) -> int:
    value = _get(header, key)
    if type(value) is not int:
        raise _wrong(header, key, "one whole number")
    return value


def _whole_list(header: GgufHeader, key: str) -> list[int]:
    value = _get(header, key)
    if not isinstance(value, list) or any(type(one) is not int for one in value):
        raise _wrong(header, key, "whole numbers")
    return value


def _wrong(header: GgufHeader, key: str, wanted: str) -> ModelError:
    return ModelError(f"{header.path}: the key {key} does not hold {wanted}; convert the adapter again")


def _get(header: GgufHeader, key: str) -> Any:
    if key not in header.metadata:
        raise ModelError(f"{header.path}: the key {key} is missing; convert the adapter again")
    return header.metadata[key]


def check_adapter(path: Path, target: GgufHeader) -> MtpAdapter:
    """The adapter with mask tokens in `path`. Raises ModelError if it is none for this model."""
    header = read_header(path)
    adapter = read_adapter(header)
    if adapter.base != base_id(target):
        raise ModelError(
            f"{path}: this adapter was trained on another model than {target.path}; give one of this "
            "model, or train one with scripts/train_mtp.py"
        )
    if max(adapter.mask_ids) >= (n_tokens := len(target.metadata["tokenizer.ggml.tokens"])):
        raise ModelError(
            f"{path}: a mask has the id {max(adapter.mask_ids)}, but the model has {n_tokens} tokens: "
            "convert the adapter again"
        )
    for tensor in header.tensors:
        if not _GATED_TENSOR.fullmatch(tensor.name):
            raise ModelError(
                f"{path}: {tensor.name} is neither of the attention's projections nor of the embeddings, "
                "the only ones that can act on masks only; train an adapter without it"
            )
    _check_tables(adapter, header, n_tokens)
    return adapter


def _check_tables(adapter: MtpAdapter, file: GgufHeader, n_tokens: int) -> None:
    """Raise ModelError for what llama.cpp does not compare: it would abort, or read beyond a table's end."""
    if adapter.sampler is not None and (n_rows := len(adapter.sampler.previous)) != n_tokens:
        raise ModelError(
            f"{file.path}: the sampler's tables have {n_rows} rows, and the model has {n_tokens} tokens: "
            "convert the adapter again"
        )
    shapes = {tensor.name: tensor.shape for tensor in file.tensors}
    a, b = (shapes.get(f"token_embd.weight.lora_{part}", (0,)) for part in "ab")
    if a[0] != b[0]:
        raise ModelError(
            f"{file.path}: the two matrices of the masks' embeddings have the ranks {a[0]} and {b[0]}: "
            "convert the adapter again"
        )
