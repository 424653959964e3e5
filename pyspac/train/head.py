"""An EAGLE-3 head as llama.cpp computes it (its models/eagle3.cpp), and how it learns.

At position p it reads token p + 1 and the model's hidden states at p, and guesses token p + 2. To draft on,
it takes its own state in place of the model's. So the second draft of a place attends to the model's states
up to there, and to the one state of its own behind them: training has to show it the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

N_LAYERS: Final = 3  # whose inputs it reads; llama.cpp wants so many
DECAY: Final = 0.8  # weight of each further draft's loss, as in the paper


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """Sizes of the head; `n_embd` is the model's too, as both share embeddings and outputs."""

    n_embd: int
    n_head: int
    n_head_kv: int
    n_head_dim: int
    n_ff: int
    rms_eps: float
    rope_base: float


@dataclass(frozen=True)
class Shared:
    """What is the model's own: `embeddings` and `outputs`, both [n_vocab, n_embd], `norm` [n_embd]."""

    embeddings: Tensor
    outputs: Tensor
    norm: Tensor


class Head(nn.Module):
    """Its tensors have the names of the GGUF, with underscores for dots."""

    def __init__(self, shape: HeadShape, shared: Shared, scale: Tensor) -> None:
        """`scale` [N_LAYERS]: the usual size of each layer's states, by which they are divided."""
        super().__init__()
        self.shape, self.shared = shape, shared
        n, n_q, n_kv = shape.n_embd, shape.n_head * shape.n_head_dim, shape.n_head_kv * shape.n_head_dim
        self.register_buffer("scale", scale)
        self.fc = nn.Linear(N_LAYERS * n, n, bias=False)
        self.attn_q, self.attn_k, self.attn_v = (nn.Linear(2 * n, m, bias=False) for m in (n_q, n_kv, n_kv))
        self.attn_output = nn.Linear(n_q, n, bias=False)
        self.ffn_gate, self.ffn_up = (nn.Linear(n, shape.n_ff, bias=False) for _ in range(2))
        self.ffn_down = nn.Linear(shape.n_ff, n, bias=False)
        self.attn_norm, self.attn_norm_2, self.ffn_norm = (nn.Parameter(torch.ones(n)) for _ in range(3))
        self.output_norm = nn.Parameter(shared.norm.clone())
        with torch.no_grad():  # to begin with, the last layer's states go on as they are
            self.fc.weight[:, -n:] += torch.eye(n)

    def drafts(self, ids: Tensor, states: Tensor, first: int, n_draft: int) -> Iterator[Tensor]:
        """Logits of the first draft behind each position from `first` on, of the second, and so on.

        `ids` [n_text, n_token], `states` [n_text, n_token - 1, N_LAYERS, n_embd]. Draft j is given the
        text's tokens, as if those before it had been right; it has logits for the starts first ..
        n_token - 3 - j: [n_text, n_start, n_vocab], which are for the tokens from first + 2 + j on.
        """
        n_all = ids.shape[1] - 2
        g = self.fc((states[:, :n_all].float() / self.scale[:, None]).flatten(2))
        positions = torch.arange(n_all, device=ids.device)
        x = self._inputs(ids[:, 1:-1], g)
        keys, values = self._keys_values(x, positions)
        sees = positions[None, :] <= positions[first:, None]  # [n_start, n_all]
        own: list[tuple[Tensor, Tensor]] = []  # keys and values of each start's drafts
        g, x = g[:, first:], x[:, first:]
        for j in range(n_draft):
            n_start = n_all - first - j
            if j:
                g = g[:, :n_start]
                x = self._inputs(ids[:, first + 1 + j : -1], g)
                own.append(self._keys_values(x, positions[first + j :]))
                own = [(k[:, :, :n_start], v[:, :, :n_start]) for k, v in own]
            q = rope(self._heads(self.attn_q(x)), positions[first + j :], self.shape.rope_base)
            g = g + self.attn_output(attend(q, keys, values, sees[:n_start], own))
            y = self._norm(g, self.ffn_norm)
            g = g + self.ffn_down(F.silu(self.ffn_gate(y)) * self.ffn_up(y))
            yield self._norm(g, self.output_norm) @ self.shared.outputs.T

    def _keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rope(self._heads(self.attn_k(x)), positions, self.shape.rope_base), self._heads(self.attn_v(x))

    def _inputs(self, ids: Tensor, g: Tensor) -> Tensor:
        tokens = F.embedding(ids, self.shared.embeddings)
        return torch.cat((self._norm(tokens, self.attn_norm), self._norm(g, self.attn_norm_2)), -1)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.shape.rms_eps) * weight

    def _heads(self, x: Tensor) -> Tensor:
        """[n_text, n, heads * n_head_dim] -> [n_text, heads, n, n_head_dim]."""
        return x.unflatten(-1, (-1, self.shape.n_head_dim)).transpose(1, 2)


def rope(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Rotated by their positions [n], neighbours together, as llama.cpp does for this architecture."""
    n = x.shape[-1]
    rate = base ** (-torch.arange(0, n, 2, device=x.device) / n)
    angle = positions[:, None] * rate
    cos, sin, even, odd = angle.cos(), angle.sin(), x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def attend(q: Tensor, keys: Tensor, values: Tensor, sees: Tensor, own: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention of each start to the text up to it, and to its own drafts: [n_text, n_start, heads * dim].

    `q` [n_text, n_head, n_start, dim]; `keys`, `values` [n_text, n_head_kv, n_all, dim]; `sees` [n_start,
    n_all] bool; `own`: keys and values of one draft each, [n_text, n_head_kv, n_start, dim].
    """
    q = q.unflatten(1, (keys.shape[1], -1)) * q.shape[-1] ** -0.5  # [n_text, n_head_kv, group, n_start, dim]
    scores = [torch.einsum("bkgsd,bktd->bkgst", q, keys).masked_fill(~sees, -torch.inf)]
    scores += [torch.einsum("bkgsd,bksd->bkgs", q, k)[..., None] for k, _ in own]
    weights = torch.cat(scores, -1).softmax(-1)
    n_all = keys.shape[2]
    out = torch.einsum("bkgst,bktd->bkgsd", weights[..., :n_all], values)
    for i, (_, v) in enumerate(own):
        out = out + weights[..., n_all + i, None] * v[:, :, None]
    return out.flatten(1, 2).transpose(1, 2).flatten(2)


def divergence(logits: Tensor, top_ids: Tensor, top_logs: Tensor) -> Tensor:
    """KL divergence, in nats, of guesses [..., n_vocab] from the model's predictions; a mean.

    Of the model's likeliest tokens one by one, and of all others together: `top_ids` and `top_logs`, both
    [..., n_top].
    """
    guessed = logits.log_softmax(-1).gather(-1, top_ids)
    top = (top_logs.exp() * (top_logs - guessed)).sum(-1)
    rest, guessed_rest = (torch.clamp(1 - x.exp().sum(-1), min=1e-6) for x in (top_logs, guessed))
    return (top + rest * (rest.log() - guessed_rest.log())).mean()
