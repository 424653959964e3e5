"""The network: token ids in, logits and the routers' loss out."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.train_demo.attention import Attention
from tools.train_demo.ffn import DenseFfn, MoeFfn
from tools.train_demo.layers import linear, matrix, rms_norm, rope_tables
from tools.train_demo.sizes import ModelConfig


class Block(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.c = c
        self.attn_norm, self.ffn_norm = (nn.Parameter(torch.ones(c.n_embd)) for _ in range(2))
        self.attn = Attention(c)
        self.ffn = MoeFfn(c) if c.n_expert else DenseFfn(c)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | None]:
        y = self.attn(rms_norm(x, self.attn_norm, self.c.rms_eps), cos, sin)
        x = x + y
        y, router_loss = self.ffn(rms_norm(x, self.ffn_norm, self.c.rms_eps))
        return x + y, router_loss


class Model(nn.Module):
    """qwen3 or qwen3moe with a tied embedding; the residual stream is float32, products are bfloat16."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.c = c
        self.embd = matrix(c.n_vocab, c.n_embd, std=0.02)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.n_layer))
        self.norm = nn.Parameter(torch.ones(c.n_embd))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """ids [n_batch, n_token] int64 -> (logits [n_batch, n_token, n_vocab] bfloat16, router loss)."""
        x, router_loss = F.embedding(ids, self.embd), torch.zeros(())
        cos, sin = rope_tables(self.c, ids.shape[1])
        for block in self.blocks:
            x, loss = block(x, cos, sin)
            router_loss = router_loss if loss is None else router_loss + loss / self.c.n_layer
        return linear(rms_norm(x, self.norm, self.c.rms_eps), self.embd), router_loss
