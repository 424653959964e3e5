"""Causal grouped-query attention with normalised queries and keys."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.train_demo.layers import linear, matrix, rms_norm, rotate
from tools.train_demo.sizes import ModelConfig


class Attention(nn.Module):
    """Causal grouped-query attention with normalised queries and keys."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.c = c
        n_q, n_kv, std = c.n_head * c.head_dim, c.n_head_kv * c.head_dim, c.n_embd**-0.5
        self.q, self.k, self.v = (matrix(n, c.n_embd, std=std) for n in (n_q, n_kv, n_kv))
        self.o = matrix(c.n_embd, n_q, std=(n_q * 2 * c.n_layer) ** -0.5)
        self.q_norm, self.k_norm = (nn.Parameter(torch.ones(c.head_dim)) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        c, (n_batch, n_token, _) = self.c, x.shape
        q = linear(x, self.q).view(n_batch, n_token, c.n_head, c.head_dim)
        k = linear(x, self.k).view(n_batch, n_token, c.n_head_kv, c.head_dim)
        v = linear(x, self.v).view(n_batch, n_token, c.n_head_kv, c.head_dim)
        q = rotate(rms_norm(q, self.q_norm, c.rms_eps), cos, sin).transpose(1, 2)
        k = rotate(rms_norm(k, self.k_norm, c.rms_eps), cos, sin).transpose(1, 2)
        n_rep = c.n_head // c.n_head_kv
        k, v = k.repeat_interleave(n_rep, dim=1), v.transpose(1, 2).repeat_interleave(n_rep, dim=1)
        out = causal_attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)).view(q.shape)
        return linear(out.transpose(1, 2).reshape(n_batch, n_token, -1), self.o)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """All [n_batch * n_head, n_token, head_dim]; on a CPU in bfloat16 2.5 times as fast as torch's own."""
    n_token, head_dim = q.shape[1:]
    mask = torch.full((n_token, n_token), -torch.inf, dtype=q.dtype).triu(1)
    scores = torch.baddbmm(mask.expand(len(q), -1, -1), q, k.mT, alpha=head_dim**-0.5)
    return torch.bmm(F.softmax(scores, dim=-1), v)
