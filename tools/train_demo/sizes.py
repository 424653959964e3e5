"""How big both models are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes of one model; `n_expert == 0` makes it dense, and then `n_ff` is the width of its only FFN."""

    n_vocab: int
    n_embd: int
    n_layer: int
    n_head: int
    n_head_kv: int
    n_ff: int
    n_expert: int = 0
    n_expert_used: int = 0
    head_dim: int = 64
    rope_theta: float = 10000.0
    rms_eps: float = 1e-6


def target_config(n_vocab: int) -> ModelConfig:
    return ModelConfig(
        n_vocab=n_vocab,
        n_embd=256,
        n_layer=6,
        n_head=4,
        n_head_kv=2,
        n_ff=128,
        n_expert=32,
        n_expert_used=4,
    )


def draft_config(n_vocab: int) -> ModelConfig:
    return ModelConfig(n_vocab=n_vocab, n_embd=160, n_layer=3, n_head=4, n_head_kv=2, n_ff=416)
