"""Target and draft together: the target learns the text, the draft what the target will say."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.train_demo.model import Model
from tools.train_demo.optimiser import OptimConfig
from tools.train_demo.sizes import draft_config, target_config


class PairLoss(torch.autograd.Function):
    """Mean cross-entropy of the target on the text and of the draft on a blend of target and text.

    The gradients of both losses by the logits are differences of probabilities, so they are made here in the
    forward: nothing of size [n_row, n_vocab] is computed twice.
    """

    @staticmethod
    def forward(
        ctx: Any, logits_tgt: Tensor, logits_dft: Tensor, labels: Tensor, share_tgt: float
    ) -> tuple[Tensor, Tensor]:
        rows = torch.arange(len(labels))
        log_p, log_q = F.log_softmax(logits_tgt.float(), -1), F.log_softmax(logits_dft.float(), -1)
        losses = torch.stack(
            (
                -log_p[rows, labels].mean(),
                -log_q[rows, labels].mean(),
                (log_p.argmax(-1) == log_q.argmax(-1)).float().mean(),
            )
        )
        p, q = log_p.exp_(), log_q.exp_()
        q.sub_(p, alpha=share_tgt)[rows, labels] -= 1 - share_tgt
        p[rows, labels] -= 1
        ctx.save_for_backward((p / len(labels)).to(logits_tgt.dtype), (q / len(labels)).to(logits_dft.dtype))
        ctx.mark_non_differentiable(losses)
        return losses.new_zeros(()), losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        p, q = ctx.saved_tensors
        return p, q, None, None


class Pair(nn.Module):
    """Target and draft over one flat, shareable float32 buffer."""

    def __init__(self, n_vocab: int) -> None:
        super().__init__()
        self.target, self.draft = Model(target_config(n_vocab)), Model(draft_config(n_vocab))

    def losses(self, ids: Tensor, labels: Tensor, o: OptimConfig) -> tuple[Tensor, Tensor]:
        """(what to differentiate, [target loss, draft loss, greedy agreement, router loss] float32)."""
        logits_tgt, router_loss = self.target(ids)
        logits_dft, _ = self.draft(ids)
        main, report = PairLoss.apply(
            logits_tgt.flatten(0, 1), logits_dft.flatten(0, 1), labels.flatten(), o.share_tgt
        )
        return main + o.router_loss * router_loss, torch.cat((report, router_loss.detach()[None]))
