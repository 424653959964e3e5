"""The sampler: scores of token pairs, of a low rank, that make the drafts of a group fit each other.

Masks guess side by side, so none of them knows which token stands before its own: the model's next one, then
the drafts of the masks before. The paper's sampler is a small network on hidden states and that token; this
one needs only logits, as they come out of llama.cpp, and two short rows per token.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from pyspac.model.mtp import N_TOP

RANK: Final = 16


class Sampler(nn.Module):
    """`previous` and `next`, both [n_vocab, rank] float32: the pair (a, b) scores previous[a] . next[b]."""

    def __init__(self, n_vocab: int, rank: int = RANK) -> None:
        super().__init__()
        self.previous = nn.Parameter(torch.randn(n_vocab, rank) * rank**-0.5)
        self.next = nn.Parameter(torch.zeros(n_vocab, rank))

    def scores(self, previous: Tensor) -> Tensor:
        """What is added to the logits of all tokens behind `previous` [...]: [..., n_vocab] float32."""
        return self.previous[previous] @ self.next.T

    def rerank(self, logits: Tensor, previous: Tensor) -> Tensor:
        """Logits [..., n_vocab] of a mask, the tokens before it [...] -> its drafts [...]."""
        top = logits.topk(min(N_TOP, logits.shape[-1]))
        pairs = self.scores(previous).gather(-1, top.indices)
        best = (top.values + pairs).argmax(-1, keepdim=True)
        return top.indices.gather(-1, best).squeeze(-1)
