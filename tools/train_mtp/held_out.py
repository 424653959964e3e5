"""How many drafts would be accepted, on texts that the model wrote behind held-out prompts, greedily."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tools.train_mtp.adapter import GatedLora, forward
from tools.train_mtp.base import Base
from tools.train_mtp.layout import make_layout
from tools.train_mtp.sampler import Sampler
from tools.train_mtp.texts import Texts

ROWS = 4  # texts that are computed at a time: all their anchors have masks


@dataclass(frozen=True)
class Guesses:
    """What the masks behind each anchor guess: `ids` and `wanted`, both [n_text, n_anchor, n_masks] int64."""

    ids: Tensor
    wanted: Tensor

    @property
    def is_right(self) -> Tensor:
        return self.ids == self.wanted


@torch.no_grad()
def guess(base: Base, adapter: GatedLora, texts: Texts, sampler: Sampler | None = None) -> Guesses:
    """Masks behind all anchors from the prompt's last token on, as far as the text says what is right."""
    n_masks, n_token = len(adapter.mask_ids), texts.ids.shape[1]
    anchors = torch.arange(texts.n_prompt - 1, n_token - 1 - n_masks)
    guessed, wanted = [], []
    for ids in texts.ids.split(ROWS):
        layout = make_layout(ids, anchors.expand(len(ids), -1), adapter.mask_ids)
        logits = forward(base, adapter, layout.to(base.device))[:, n_token:].float().cpu()
        logits = logits.unflatten(1, (len(anchors), n_masks))
        first = ids[:, anchors + 1]  # the model's own next token
        guessed.append(chain(logits, first, sampler))
        wanted.append(ids[:, layout.teachers[0] + 1])
    return Guesses(torch.cat(guessed), torch.cat(wanted))


def chain(logits: Tensor, first: Tensor, sampler: Sampler | None) -> Tensor:
    """The drafts of each group, one behind another: logits [..., n_masks, n_vocab] -> [..., n_masks]."""
    if sampler is None:
        return logits.argmax(-1)
    drafts, previous = [], first
    for i in range(logits.shape[-2]):
        previous = sampler.rerank(logits[..., i, :], previous)
        drafts.append(previous)
    return torch.stack(drafts, -1)


def tokens_per_step(is_right: Tensor, n_masks: int) -> float:
    """Mean over a walk through each text; is_right [n_text, n_anchor, >= n_masks] bool.

    A step whose last accepted anchor is a leads to one at a + 1 + (leading right guesses of a's masks): the
    model's own next token comes first, then the accepted drafts.
    """
    right = is_right[..., :n_masks].long().cumprod(-1).sum(-1)
    n_step = n_token = 0
    for row in right.tolist():
        at = 0
        while at < len(row):
            n_step, n_token, at = n_step + 1, n_token + 1 + row[at], at + 1 + row[at]
    return n_token / n_step


def report(guesses: Guesses) -> dict[str, list[float]]:
    """By mask: guesses that are right, and right like all before them; tokens per step by number of masks."""
    right = guesses.is_right
    leading = right.long().cumprod(-1)
    return {
        "right": right.float().mean((0, 1)).tolist(),
        "accepted": leading.float().mean((0, 1)).tolist(),
        "tokens_per_step": [tokens_per_step(right, k + 1) for k in range(right.shape[-1])],
    }
