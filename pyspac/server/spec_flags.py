"""Drafters in a server: which there are, what llama-server calls them, and its flags for their lengths."""

from __future__ import annotations

from pyspac.errors import ConfigError
from pyspac.generate.spec_types import DRAFT, DRAFT_LORA, DRAFT_SIMPLE, NGRAM


def check_in_server(spec_type: str) -> None:
    """Raise ConfigError for what a server cannot draft with."""
    if spec_type == DRAFT_LORA:
        raise ConfigError(
            "--spec-type", spec_type, "another one in a server: `pyspac run` and `chat` know it"
        )


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
