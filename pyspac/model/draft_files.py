"""Which files can draft for which model, as far as their headers say.

In: a drafter's name, and the headers of target and draft. Out: nothing, or a ModelError that says what to
give instead: where llama.cpp has no graph for a head, or a draft reads what it does not hand out, it computes
something else or aborts.
"""

from __future__ import annotations

from typing import Final

from pyspac.errors import ModelError, UsageError
from pyspac.model.checks import check_same_vocab
from pyspac.model.gguf_header import GgufHeader
from pyspac.model.spec_types import (
    DRAFT,
    DRAFT_EAGLE3,
    DRAFT_MTP,
    NGRAM,
    SERVER_ONLY,
    names_of,
    reads_like_target,
)

# which llama.cpp has a graph of the head for: the others would compute their first layers instead
HEAD_ARCHITECTURES: Final = (
    "bailingmoe3", "cohere2moe", "deepseek2", "deepseek32", "deepseek4", "glm-dsa", "glm4moe", "glm5-next",
    "hy_v3", "mimo2", "nemotron_h_moe", "qwen35", "qwen35moe", "qwen3next", "step35",
)  # fmt: skip
# whose hidden states llama.cpp hands out layer by layer, as EAGLE-3 and DFlash need; it aborts at the others
STATE_ARCHITECTURES: Final = (
    "bailingmoe3", "deepseek4", "gemma4", "gpt-oss", "hunyuan-dense", "hunyuan_vl", "lfm2", "lfm2moe",
    "llama", "llama-embed", "mimo2", "minimax-01", "minimax-m2", "muse-glimmer", "nanbeige", "nemotron_h",
    "nemotron_h_moe", "qwen3", "qwen35", "qwen35moe", "qwen3moe", "qwen3next", "qwen4exp",
)  # fmt: skip
# what llama.cpp asserts of heads
_SEVERAL_HEADS: Final = ("hy_v3", "mimo2", "qwen3next", "step35")
_HEADS_WITH_MLA: Final = ("deepseek2", "deepseek32", "glm-dsa")
# architectures of drafts that only guess with the target's hidden states, and what they are for
_DRAFT_ARCHITECTURES: Final = {"eagle3": (DRAFT_EAGLE3,), "dflash": SERVER_ONLY}


def has_head(header: GgufHeader) -> bool:
    """Whether the file has a head that predicts further tokens (NextN, MTP), and llama.cpp a graph for it."""
    n_heads = int(header.get("nextn_predict_layers", 0))
    if header.architecture not in HEAD_ARCHITECTURES or n_heads < 1:
        return False
    if n_heads > 1 and header.architecture not in _SEVERAL_HEADS:
        return False
    if header.architecture in _HEADS_WITH_MLA and not header.get("attention.key_length_mla", 0):
        return False
    name = f"blk.{int(header.get('block_count', 0)) - 1}.nextn.eh_proj.weight"
    return any(tensor.name == name for tensor in header.tensors)


def drafting_note(header: GgufHeader) -> str | None:
    """What a file drafts with, or that it is nothing but a draft; None: a model that drafts as any other."""
    wanted = _DRAFT_ARCHITECTURES.get(header.architecture)
    if wanted is not None:
        return f"a draft of another model: -md with --spec-type {' or '.join(wanted)}"
    return f"has an MTP head: --spec-type {DRAFT_MTP}" if has_head(header) else None


def spec_type_of(draft: GgufHeader) -> str | None:
    """The one way in which a file can draft; None: it is a model, which drafts in more than one."""
    return next(iter(_DRAFT_ARCHITECTURES.get(draft.architecture, ())), None)


def check_is_target(header: GgufHeader) -> None:
    """Raise ModelError for a draft that cannot run by itself; llama.cpp would fail while loading it."""
    if wanted := _DRAFT_ARCHITECTURES.get(header.architecture):
        raise ModelError(
            f"{header.path}: this is a draft ({header.architecture}) of another model, which cannot run by "
            f"itself; give that model with -m, and this file with -md and --spec-type {' or '.join(wanted)}"
        )


def check_drafter(spec_type: str, target: GgufHeader, draft: GgufHeader | None) -> None:
    """Raise ModelError where the files cannot draft so, as far as their headers say."""
    names = names_of(spec_type)
    if draft is not None:
        wanted = _DRAFT_ARCHITECTURES.get(draft.architecture)
        if wanted is not None and not set(wanted) & set(names):
            raise ModelError(
                f"{draft.path}: this draft ({draft.architecture}) needs --spec-type {' or '.join(wanted)}"
            )
        for name in names:
            if name in (DRAFT_EAGLE3, *SERVER_ONLY) and (wanted is None or name not in wanted):
                raise ModelError(
                    f"{draft.path}: {name} needs a draft that was trained for it, and this is a model of the "
                    f"architecture {draft.architecture}; give such a draft with -md, or --spec-type draft"
                )
        if wanted is not None:
            _check_states(target, draft)
        if reads_like_target(spec_type):
            check_same_vocab(target, draft)
        else:
            _check_is_of(target, draft, names)
    if DRAFT_MTP in names and not has_head(draft or target):
        raise ModelError(
            f"{(draft or target).path}: this model has no head that predicts further tokens, which "
            f"{DRAFT_MTP} needs; use a file that has one, or --spec-type {NGRAM}; an adapter with mask "
            "tokens needs no head, only --mtp"
        )


def gate_layers(option: str, target: GgufHeader, draft: GgufHeader, spec_type: str) -> list[int]:
    """Which layer of the draft model tells of each layer of the target's, as draft-gate.cpp has it.

    Raises UsageError, with `option`, where the draft model's hidden states do not fit the target's routers.
    """
    if not reads_like_target(spec_type):
        raise UsageError(f"{option} reads a draft model of --spec-type {DRAFT}: choose that one")
    widths = [int(header.get("embedding_length", 0)) for header in (draft, target)]
    if widths[0] != widths[1]:
        raise UsageError(
            f"{option} needs a draft model as wide as the target: {draft.path} has a width of {widths[0]}, "
            f"{target.path} of {widths[1]}; give another draft model with -md, such as the target in fewer "
            f"bits, or leave {option} out"
        )
    n_draft, n = (_n_layer(header) for header in (draft, target))
    return [il * n_draft // n for il in range(n)]


def _n_layer(header: GgufHeader) -> int:
    """Without heads that predict further tokens."""
    return int(header.get("block_count", 0)) - int(header.get("nextn_predict_layers", 0))


def _check_is_of(target: GgufHeader, head: GgufHeader, names: list[str]) -> None:
    """Raise ModelError for a head of another model; llama.cpp would abort at a token that is new to it."""
    give = "give the head of this model with -md"
    if DRAFT_MTP in names and head.architecture != target.architecture:
        raise ModelError(
            f"{head.path}: this head is of the architecture {head.architecture}, and {target.path.name} of "
            f"{target.architecture}; {give}"
        )
    known, needed = (len(header.metadata.get("tokenizer.ggml.tokens") or []) for header in (head, target))
    if 0 < known < needed:
        raise ModelError(
            f"{head.path}: this head knows {known} tokens, and {target.path.name} has {needed}; {give}"
        )
    if int(head.get("block_count", 1)) < 1:
        raise ModelError(f"{head.path}: a head without layers (block_count is 0), which is not whole; {give}")


def _check_states(target: GgufHeader, draft: GgufHeader) -> None:
    """Raise ModelError unless the draft can read the target's hidden states; llama.cpp would abort."""
    if target.architecture not in STATE_ARCHITECTURES:
        raise ModelError(
            f"{draft.path}: this draft reads hidden states of the model, which llama.cpp does not hand out "
            f"for the architecture {target.architecture}; give a draft model, or --spec-type {NGRAM}"
        )
    n_layer, n_embd = int(target.get("block_count", 0)), target.get("embedding_length")
    layers, wanted = draft.get("target_layers") or [], draft.get("target_hidden_size", n_embd)
    if wanted != n_embd or any(not 0 <= il <= n_layer for il in layers):
        raise ModelError(
            f"{draft.path}: this draft is for a model of the width {wanted} and at least "
            f"{max(layers, default=0)} layers, and {target.path.name} has {n_embd} and {n_layer}; give the "
            "draft of this model with -md"
        )
