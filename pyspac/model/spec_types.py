"""The names of `--spec-type`: what each drafts with, and what it needs.

In: text. Out: a canonical name, or a ConfigError that lists them. `draft`, `ngram` and `draft-lora` are
pyspac's own; the others are llama.cpp's (common/speculative.cpp), which may be listed: of those the first
that finds something drafts, n-grams before models.
"""

from __future__ import annotations

from typing import Final

from pyspac.errors import ConfigError, UsageError

NONE: Final = "none"
DRAFT: Final = "draft"  # a draft model: llama.cpp's draft-simple
NGRAM: Final = "ngram"  # the text so far: the engine (engine/src/draft/ngram-drafter.h)
DRAFT_LORA: Final = "draft-lora"  # mask tokens: the engine
OWN: Final = (DRAFT, NGRAM, DRAFT_LORA)
DRAFT_SIMPLE: Final = "draft-simple"
DRAFT_MTP: Final = "draft-mtp"
DRAFT_EAGLE3: Final = "draft-eagle3"
_NEEDS_DRAFT: Final = (DRAFT, DRAFT_SIMPLE, DRAFT_EAGLE3, "draft-dflash", "draft-dspark")
SERVER_ONLY: Final = ("draft-dflash", "draft-dspark")
_TEXT: Final = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
LLAMA: Final = (DRAFT_SIMPLE, DRAFT_EAGLE3, DRAFT_MTP, *SERVER_ONLY, *_TEXT)


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
            raise UsageError(f"--spec-type {text}: {name} cannot be in a list; only llama.cpp's names can")
    if sum(name.startswith("draft-") for name in names) > 1:
        raise UsageError(
            f"--spec-type {text}: there is one draft model or head; give one of the draft- names"
        )
    return ",".join(names)


def check_has_adapter(spec_type: str, *, has_adapter: bool) -> None:
    """Raise UsageError where the adapter is missing, or would not be used."""
    if spec_type == DRAFT_LORA and not has_adapter:
        raise UsageError(
            f"--spec-type {DRAFT_LORA} needs an adapter with mask tokens: give one with --mtp; a head that "
            f"the model has built in needs none: --spec-type {DRAFT_MTP}"
        )
    if has_adapter and DRAFT_MTP in names_of(spec_type):
        raise UsageError(
            f"--mtp names an adapter with mask tokens, and --spec-type {DRAFT_MTP} means the head that a "
            "model has built in: leave one of them out"
        )
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


def needs_draft(spec_type: str) -> bool:
    return any(name in _NEEDS_DRAFT for name in names_of(spec_type))


def takes_draft(spec_type: str) -> bool:
    """A head may lie in a file of its own."""
    return needs_draft(spec_type) or DRAFT_MTP in names_of(spec_type)


def reads_like_target(spec_type: str) -> bool:
    """Whether the draft is a model that could run by itself: it has routers and logits as the target has."""
    return any(name in (DRAFT, DRAFT_SIMPLE) for name in names_of(spec_type))
