"""Both feed-forward networks: one SwiGLU, and a mixture of many."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.train_demo.layers import linear, matrix
from tools.train_demo.sizes import ModelConfig


class Permute(torch.autograd.Function):
    """Rows of x in another order; knowing the inverse order makes the backward a gather, not a scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse, order)
        return x[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        inverse, _ = ctx.saved_tensors
        return grad[inverse], None, None


class GroupedLinear(torch.autograd.Function):
    """Rows sorted by expert, each group times its own weight: [n_row, n_in] x [n_expert, n_out, n_in]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bounds: list[int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bounds = bounds
        out = x.new_empty(x.shape[0], weight.shape[1])
        for ie, (a, b) in enumerate(itertools.pairwise(bounds)):
            torch.mm(x[a:b], weight[ie].T, out=out[a:b])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x, grad_w = torch.empty_like(x), torch.empty_like(weight)
        for ie, (a, b) in enumerate(zip(ctx.bounds[:-1], ctx.bounds[1:], strict=True)):
            torch.mm(grad[a:b], weight[ie], out=grad_x[a:b])
            torch.mm(grad[a:b].T, x[a:b], out=grad_w[ie])
        return grad_x, grad_w, None


class DenseFfn(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.gate_up = matrix(2, c.n_ff, c.n_embd, std=c.n_embd**-0.5)
        self.down = matrix(c.n_embd, c.n_ff, std=(c.n_ff * 2 * c.n_layer) ** -0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        gate, up = linear(x, self.gate_up.flatten(0, 1)).chunk(2, dim=-1)
        return linear(F.silu(gate) * up, self.down), None


class MoeFfn(nn.Module):
    """Top-k of `n_expert` SwiGLUs, weighted by the renormalised softmax of the router."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.n_expert, self.n_expert_used = c.n_expert, c.n_expert_used
        self.router = matrix(c.n_expert, c.n_embd, std=c.n_embd**-0.5)
        self.gate_up = matrix(c.n_expert, 2, c.n_ff, c.n_embd, std=c.n_embd**-0.5)
        self.down = matrix(c.n_expert, c.n_embd, c.n_ff, std=(c.n_ff * 2 * c.n_layer) ** -0.5)
        self.counts = torch.zeros(c.n_expert)  # [n_expert] float32: share of the last batch, for the report

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [n_batch, n_token, n_embd] -> (same, router loss: a scalar)."""
        shape, k = x.shape, self.n_expert_used
        x = x.flatten(0, 1)  # [n_row, n_embd] bfloat16
        probs = F.softmax(x.float() @ self.router.T, dim=-1)  # [n_row, n_expert] float32
        weights, ids = probs.topk(k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        order = ids.flatten().argsort(stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        counts = torch.bincount(ids.flatten(), minlength=self.n_expert)
        bounds = [0, *counts.cumsum(0).tolist()]
        rows = Permute.apply(x.unsqueeze(1).expand(-1, k, -1).reshape(-1, shape[-1]), order, inverse)
        gate, up = GroupedLinear.apply(rows, self.gate_up.flatten(1, 2).to(x.dtype), bounds).chunk(2, dim=-1)
        rows = GroupedLinear.apply(F.silu(gate) * up, self.down.to(x.dtype), bounds)
        rows = Permute.apply(rows, inverse, order).view(-1, k, shape[-1])
        out = torch.bmm(weights.to(x.dtype).unsqueeze(1), rows).squeeze(1)
        self.counts = counts / len(order)
        return out.view(shape), self.n_expert * (self.counts * probs.mean(0)).sum()
