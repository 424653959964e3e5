"""The optimiser: Muon for matrices, Adam for the rest, and the learning rate over the time budget."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    lr_muon: float = 0.02
    lr_adam: float = 0.003
    weight_decay: float = 0.1  # times the learning rate
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.95)
    warmup: float = 0.015  # share of the time budget
    decay_from: float = 0.35  # share of the time budget after which the rate falls linearly to zero
    long_from: float = 0.7  # share of the time budget after which windows are whole, not cut in halves
    router_loss: float = 0.03
    share_tgt: float = 0.8  # the draft's aim: this much of the target's distribution, the rest the text


def lr_factor(o: OptimConfig, progress: float) -> float:
    """Warm-up, stable, linear decay; `progress` is the share of the time budget used, 0 to 1."""
    return max(0.0, min(progress / o.warmup, 1.0, (1 - progress) / (1 - o.decay_from))) + 1e-4


def orthogonalise(g: Tensor) -> Tensor:
    """Newton-Schulz steps towards the nearest orthogonal matrix (Muon), batched: [n, rows, cols]."""
    x = g.bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / (x.flatten(-2).norm(dim=-1)[:, None, None] + 1e-7)
    for a, b, c in [(3.4445, -4.7750, 2.0315)] * 5:
        xx = x @ x.mT
        x = a * x + (b * xx + c * (xx @ xx)) @ x
    return (x.mT if is_tall else x).float()


def update_muon(p: Tensor, g: Tensor, m: Tensor, o: OptimConfig, factor: float) -> None:
    lr = o.lr_muon * factor
    m.lerp_(g, 1 - o.momentum)
    step = orthogonalise(g.lerp(m, o.momentum).view(-1, *p.shape[-2:])).view_as(p)
    p.mul_(1 - lr * o.weight_decay).sub_(step, alpha=lr * max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5)


def update_adam(p: Tensor, g: Tensor, m: Tensor, v: Tensor, o: OptimConfig, factor: float, step: int) -> None:
    lr, (b1, b2) = o.lr_adam * factor, o.betas
    m.lerp_(g, 1 - b1)
    v.lerp_(g * g, 1 - b2)
    scale = (v / (1 - b2 ** (step + 1))).sqrt_().add_(1e-10)
    if p.ndim > 1:
        p.mul_(1 - lr * o.weight_decay)
    p.sub_(m / scale, alpha=lr / (1 - b1 ** (step + 1)))


def is_muon(name: str, p: Tensor) -> bool:
    return p.ndim > 1 and not name.endswith(("embd", "router"))
