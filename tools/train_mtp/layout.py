"""Where masks stand and what they see: one row of tokens is a text, then groups of masks behind its anchors.

    text   x0 x1 x2 x3 ...                 positions 0 1 2 3 ...
    group  of anchor x1: m1 m2 .. mK       positions 2 3 .. K + 1, as if they went on from x1

A mask sees the text up to its anchor, the earlier masks of its group, and itself. The text sees no mask.
Mask i behind the anchor at position p guesses the token at p + 1 + i, so its teacher is the model at p + i;
the token at p + 1 is the model's own guess at the anchor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """A batch of rows of n_token + n_group * n_masks = n_row tokens; the text comes first.

    `ids` and `positions` are [n_text, n_row] int64. `mask`, the same, says which mask a token is, from 1, and
    is 0 for the text: the gate. `attention` is [n_text, 1, n_row, n_row] bool: whether a token (third
    dimension) sees another (fourth). `teachers` is [n_text, n_group, n_masks] int64: the index in the row
    whose logits are those that a mask should have.
    """

    ids: Tensor
    positions: Tensor
    mask: Tensor
    attention: Tensor
    teachers: Tensor

    def to(self, device: torch.device) -> Layout:
        return Layout(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))


def make_layout(ids: Tensor, anchors: Tensor, mask_ids: list[int]) -> Layout:
    """Put masks behind `anchors` [n_text, n_group], indices into `ids` [n_text, n_token]."""
    (n_text, n_token), n_group, n_masks = ids.shape, anchors.shape[1], len(mask_ids)
    numbers = torch.arange(1, n_masks + 1)
    after = anchors[:, :, None] + numbers  # [n_text, n_group, n_masks]: a mask's position, and its teacher
    places = torch.arange(n_token).expand(n_text, -1)
    masks = numbers.repeat(n_group).expand(n_text, -1)
    return Layout(
        torch.cat((ids, torch.tensor(mask_ids).repeat(n_group).expand(n_text, -1)), dim=1),
        torch.cat((places, after.flatten(1)), dim=1),
        torch.cat((torch.zeros_like(places), masks), dim=1),
        sees(n_token, anchors, n_masks),
        after,
    )


def sees(n_token: int, anchors: Tensor, n_masks: int) -> Tensor:
    """[n_text, 1, n_row, n_row] bool, see `Layout.attention`."""
    n_text, n_group = anchors.shape
    text = torch.arange(n_token)
    anchor = torch.cat((text.expand(n_text, -1), anchors.repeat_interleave(n_masks, dim=1)), dim=1)
    group = torch.cat((torch.full((n_token,), -1), torch.arange(n_group).repeat_interleave(n_masks)))
    number = torch.cat((torch.zeros(n_token), torch.arange(n_masks).repeat(n_group)))
    of_text = (group == -1) & (anchor[:, None, :] <= anchor[:, :, None])
    of_group = (group != -1) & (group == group[:, None]) & (number <= number[:, None])
    return (of_text | of_group).unsqueeze(1)
