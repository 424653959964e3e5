"""Drafters in a server: which there are, what llama-server calls them, and its flags for their lengths."""

from __future__ import annotations

from typing import Final

from pyspac.model.spec_types import DRAFT, DRAFT_LORA, DRAFT_SIMPLE, NGRAM
from pyspac.speculation.cost_table import masked_width

_NGRAM: Final = "ngram-simple"


def in_server(spec_type: str) -> str:
    """llama-server's name: it has none of pyspac's own drafters.

    With masks and with `ngram` the engine drafts in the place of one that needs no model, and that is what
    drafts where there is no engine.
    """
    return {DRAFT: DRAFT_SIMPLE, NGRAM: _NGRAM, DRAFT_LORA: _NGRAM}.get(spec_type, spec_type)


def length_flags(name: str, n_max: int) -> dict[str, int]:
    """llama-server's flags for drafts of `n_max` tokens at most, by one of llama.cpp's names.

    ngram-cache has none.
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


def mask_flags(n_max: int) -> dict[str, int]:
    """As `length_flags`, with masks: llama-server has room for as many logits as its longest draft needs."""
    return {"--spec-ngram-simple-size-m": masked_width(n_max, n_max) - 1}
