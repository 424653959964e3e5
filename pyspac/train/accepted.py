"""How many drafts hold, on texts that the model wrote greedily behind held-out prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def tokens_per_step(is_right: Tensor, n_draft: int) -> float:
    """Mean over a walk through each text; is_right [n_text, n_anchor, >= n_draft] bool.

    A step whose last accepted anchor is a leads to one at a + 1 + (leading right drafts behind a): the
    model's own next token comes first, then the accepted drafts.
    """
    right = is_right[..., :n_draft].long().cumprod(-1).sum(-1)
    n_step = n_token = 0
    for row in right.tolist():
        at = 0
        while at < len(row):
            n_step, n_token, at = n_step + 1, n_token + 1 + row[at], at + 1 + row[at]
    return n_token / n_step


def report(is_right: Tensor) -> dict[str, list[float]]:
    """By position of the draft, of `is_right` [n_text, n_anchor, n_draft] bool.

    Drafts that are right, and right like all before them; tokens per step with one draft, two ...
    """
    leading = is_right.long().cumprod(-1)
    return {
        "right": is_right.float().mean((0, 1)).tolist(),
        "accepted": leading.float().mean((0, 1)).tolist(),
        "tokens_per_step": [tokens_per_step(is_right, k + 1) for k in range(is_right.shape[-1])],
    }


def describe(row: Mapping[str, Any]) -> str:
    """What `report` found, as a line to read."""
    numbers = {
        name: " ".join(f"{x:.3f}" for x in row[name]) for name in ("right", "accepted", "tokens_per_step")
    }
    return (
        f"held out, by position: right {numbers['right']}, accepted {numbers['accepted']}; "
        f"tokens per step with 1, 2 ... drafts: {numbers['tokens_per_step']}"
    )
