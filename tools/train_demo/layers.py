"""What every layer is made of: float32 master weights, bfloat16 products, norms and rotary positions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.train_demo.sizes import ModelConfig


def matrix(*shape: int, std: float) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * std)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """bfloat16 product with a float32 master weight: [..., n_in] -> [..., n_out]."""
    return F.linear(x, weight.to(x.dtype))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """In float32, handed on as bfloat16."""
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(torch.bfloat16)


def rope_tables(c: ModelConfig, n_token: int) -> tuple[Tensor, Tensor]:
    """cos and sin, each [n_token, 1, head_dim / 2] bfloat16."""
    freq = c.rope_theta ** (-torch.arange(0, c.head_dim, 2).float() / c.head_dim)
    angle = torch.arange(n_token).float()[:, None] * freq
    return angle.cos().bfloat16()[:, None], angle.sin().bfloat16()[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of [n_batch, n_token, n_head, head_dim], halves as pairs."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
