"""The names of `--spec-type`: what each drafts with, and what it needs.

In: text. Out: a canonical name, or a ConfigError that lists them. `draft`, `ngram` and `draft-lora` are
pyspac's own; the others are llama.cpp's (common/speculative.cpp), which may be listed: of those the first
that finds something drafts, n-grams before models.
"""

from __future__ import annotations

from typing import Final

from pyspac.errors import ConfigError, ModelError, UsageError
from pyspac.model.checks import check_same_vocab
from pyspac.model.gguf_header import GgufHeader

NONE: Final = "none"
DRAFT: Final = "draft"  # a draft model: generate/drafting.py; in a server draft-simple
NGRAM: Final = "ngram"  # the text so far: generate/drafting.py; in a server ngram-simple
DRAFT_LORA: Final = (
    "draft-lora"  # an adapter with mask tokens: generate/lora_drafter.py; in one process alone
)
OWN: Final = (DRAFT, NGRAM, DRAFT_LORA)
DRAFT_SIMPLE: Final = "draft-simple"
DRAFT_MTP: Final = "draft-mtp"
_NEEDS_DRAFT: Final = (DRAFT, DRAFT_SIMPLE, "draft-eagle3", "draft-dflash", "draft-dspark")
_SERVER_ONLY: Final = ("draft-dflash", "draft-dspark")
_TEXT: Final = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
LLAMA: Final = (DRAFT_SIMPLE, "draft-eagle3", DRAFT_MTP, *_SERVER_ONLY, *_TEXT)
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
_DRAFT_ARCHITECTURES: Final = {"eagle3": ("draft-eagle3",), "dflash": _SERVER_ONLY}


def parse_spec_type(text: str | None) -> str | None:
    """The name or comma-separated names, without spaces and repetitions. Raises ConfigError."""
    if text is None:
        return None
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in (*OWN, NONE, *LLAMA):
            wanted = f"{', '.join(OWN)}, {NONE}, or one or more of llama.cpp's: {', '.join(LLAMA)}"
            raise ConfigError("--spec-type", name, wanted)
        if name not in LLAMA and len(names) > 1:
            raise UsageError(f"--spec-type {text}: {name} stands alone; only llama.cpp's names can be listed")
    if sum(name.startswith("draft-") for name in names) > 1:
        raise UsageError(
            f"--spec-type {text}: there is one draft model or head; give one of the draft- names"
        )
    return ",".join(names)


def check_in_process(spec_type: str) -> None:
    """Raise ConfigError for what only a server can draft with."""
    for name in names_of(spec_type):
        if name in _SERVER_ONLY:
            raise ConfigError("--spec-type", name, "another one, or run `pyspac serve`, which knows it")


def check_in_server(spec_type: str) -> None:
    """Raise ConfigError for what a server cannot draft with."""
    if spec_type == DRAFT_LORA:
        raise ConfigError(
            "--spec-type", spec_type, "another one in a server: `pyspac run` and `chat` know it"
        )


def check_has_adapter(spec_type: str, *, has_adapter: bool) -> None:
    """Raise UsageError where the adapter is missing, or would not be used."""
    if spec_type == DRAFT_LORA and not has_adapter:
        raise UsageError(f"--spec-type {DRAFT_LORA} needs an adapter with mask tokens: give one with --mtp")
    if has_adapter and spec_type != DRAFT_LORA:
        raise UsageError(f"--spec-type {spec_type} uses no adapter: leave out --mtp, or choose {DRAFT_LORA}")


def check_has_draft(spec_type: str, *, has_draft: bool) -> None:
    """Raise UsageError where a draft model is missing, or would not be used."""
    if needs_draft(spec_type) and not has_draft:
        raise UsageError(
            f"--spec-type {spec_type} needs a draft model: give one with -md, or choose ngram or none"
        )
    if has_draft and not takes_draft(spec_type):
        raise UsageError(f"--spec-type {spec_type} uses no draft model: leave out -md, or choose draft")


def names_of(spec_type: str) -> list[str]:
    return spec_type.split(",")


def is_llamas(spec_type: str) -> bool:
    """Whether llama.cpp's library drafts."""
    return spec_type not in (*OWN, NONE)


def is_free(spec_type: str) -> bool:
    """Whether no model drafts."""
    return all(name in (NONE, NGRAM, *_TEXT) for name in names_of(spec_type))


def needs_draft(spec_type: str) -> bool:
    return any(name in _NEEDS_DRAFT for name in names_of(spec_type))


def takes_draft(spec_type: str) -> bool:
    """A head may lie in a file of its own."""
    return needs_draft(spec_type) or DRAFT_MTP in names_of(spec_type)


def reads_like_target(spec_type: str) -> bool:
    """Whether the draft is a model that could run by itself: it has routers and logits as the target has."""
    return any(name in (DRAFT, DRAFT_SIMPLE) for name in names_of(spec_type))


def in_server(spec_type: str) -> str:
    """llama-server's name: it has none of pyspac's own drafters."""
    return {DRAFT: DRAFT_SIMPLE, NGRAM: "ngram-simple"}.get(spec_type, spec_type)


def length_flags(name: str, n_max: int) -> dict[str, int]:
    """llama-server's flags for drafts of `n_max` tokens at most, by one of llama.cpp's names.

    As libspac sets them in one process (engine/src/common/library-drafter.cpp). ngram-cache has none.
    """
    match name:
        case "ngram-simple":  # drafts as many tokens as have to match, or nothing
            return {"--spec-ngram-simple-size-n": min(12, n_max), "--spec-ngram-simple-size-m": n_max}
        case "ngram-map-k" | "ngram-map-k4v":
            return {f"--spec-{name}-size-m": n_max}
        case "ngram-mod":
            return {"--spec-ngram-mod-n-min": min(48, n_max), "--spec-ngram-mod-n-max": n_max}
        case "ngram-cache" | "none":
            return {}
    return {"--spec-draft-n-max": n_max}


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
            if name in ("draft-eagle3", *_SERVER_ONLY) and (wanted is None or name not in wanted):
                raise ModelError(
                    f"{draft.path}: {name} needs a draft that was trained for it, and this is a model of the "
                    f"architecture {draft.architecture}; give such a draft with -md, or --spec-type draft"
                )
        if wanted is not None:
            _check_states(target, draft)
        if reads_like_target(spec_type):
            check_same_vocab(target, draft)
    if DRAFT_MTP in names and not has_head(draft or target):
        raise ModelError(
            f"{(draft or target).path}: this model has no head that predicts further tokens, which "
            f"{DRAFT_MTP} needs; use a file that has one, or --spec-type {NGRAM}"
        )


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
