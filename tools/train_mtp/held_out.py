"""How many drafts would be accepted, on texts that the model wrote behind held-out prompts, greedily."""

from __future__ import annotations

import torch
from torch import Tensor

from tools.train_mtp.adapter import GatedLora, forward
from tools.train_mtp.base import Base
from tools.train_mtp.layout import make_layout
from tools.train_mtp.sampler import Sampler
from tools.train_mtp.texts import Texts

ROWS = 4  # texts that are computed at a time: all their anchors have masks


@torch.no_grad()
def guess(base: Base, adapter: GatedLora, texts: Texts, sampler: Sampler | None = None) -> Tensor:
    """Whether masks are right, behind all anchors from the prompt's last token on that have text behind them.

    [n_text, n_anchor, n_masks] bool.
    """
    n_masks, n_token = len(adapter.mask_ids), texts.ids.shape[1]
    anchors = torch.arange(texts.n_prompt - 1, n_token - 1 - n_masks)
    right = []
    for ids in texts.ids.split(ROWS):
        layout = make_layout(ids, anchors.expand(len(ids), -1), adapter.mask_ids)
        logits = forward(base, adapter, layout.to(base.device))[:, n_token:].float().cpu()
        logits = logits.unflatten(1, (len(anchors), n_masks))
        first = ids[:, anchors + 1]  # the model's own next token
        right.append(chain(logits, first, sampler) == ids[:, layout.teachers[0] + 1])
    return torch.cat(right)


def chain(logits: Tensor, first: Tensor, sampler: Sampler | None) -> Tensor:
    """The drafts of each group, one behind another: logits [..., n_masks, n_vocab] -> [..., n_masks]."""
    if sampler is None:
        return logits.argmax(-1)
    drafts, previous = [], first
    for i in range(logits.shape[-2]):
        previous = sampler.rerank(logits[..., i, :], previous)
        drafts.append(previous)
    return torch.stack(drafts, -1)
