"""The pair on modules that it has not seen: losses, agreement, load of the experts, speculation."""

from __future__ import annotations

import torch
from torch import Tensor

from tools.train_demo.common import N_CTX
from tools.train_demo.distillation import Pair
from tools.train_demo.model import Model
from tools.train_demo.optimiser import OptimConfig


def held_out_windows(tokens: Tensor, n_window: int, n_token: int) -> Tensor:
    """Evenly spread windows of the held-out stream: [n_window, n_token + 1] int64."""
    starts = torch.linspace(0, len(tokens) - n_token - 2, n_window).long()
    return torch.stack([tokens[a : a + n_token + 1] for a in starts.tolist()])


@torch.no_grad()
def held_out_report(pair: Pair, tokens: Tensor, n_window: int = 32) -> dict[str, float]:
    """Losses in nats per token, greedy agreement on the text, and how evenly the experts are loaded."""
    reports, balance = [], []
    for batch in held_out_windows(tokens, n_window, N_CTX // 2).split(8):
        reports.append(pair.losses(batch[:, :-1], batch[:, 1:], OptimConfig())[1])
        balance.append(expert_balance(pair.target))
    loss_tgt, loss_dft, agreement, _ = torch.stack(reports).mean(0).tolist()
    max_load, n_idle = torch.tensor(balance).mean(0).tolist()
    return {
        "loss_target": loss_tgt,
        "loss_draft": loss_dft,
        "agreement": agreement,
        "max_expert_load": max_load,
        "n_idle_experts": n_idle,
    }


def expert_balance(target: Model) -> tuple[float, float]:
    """(busiest expert's load over the mean load, experts without a row), averaged over layers."""
    counts = torch.stack([b.ffn.counts for b in target.blocks])  # [n_layer, n_expert] float32
    return (counts.amax(1) * counts.shape[1]).mean().item(), (counts == 0).sum(1).float().mean().item()


@torch.no_grad()
def greedy(model: Model, ids: Tensor, n_new: int) -> Tensor:
    """ids [n_batch, n_token] and `n_new` greedy tokens after them (no KV cache: short texts only)."""
    for _ in range(n_new):
        ids = torch.cat((ids, model(ids)[0][:, -1:].argmax(-1)), dim=1)
    return ids


def acceptance_length(is_match: list[bool], n_draft: int) -> float:
    """Tokens per step: 1 + accepted/steps, from whether the draft's greedy guess of each token is right.

    As long as the drafted tokens are right, the draft sees the target's own text; so its guesses along that
    text say where a step ends. Example: right, right, wrong, right with n_draft 4 are steps of 3 and 1.
    """
    i = n_step = 0
    while i < len(is_match):
        run = 0
        while run < n_draft and i + run < len(is_match) and is_match[i + run]:
            run += 1
        i, n_step = i + run + 1, n_step + 1
    return min(i, len(is_match)) / max(n_step, 1)


@torch.no_grad()
def speculative_report(pair: Pair, tokens: Tensor, n_draft: int = 4, n_prompt: int = 24) -> dict[str, float]:
    """Greedy speculation after held-out prompts of 256 tokens, 64 new tokens each."""
    n_new, prompts = 64, held_out_windows(tokens, n_prompt, 256)[:, :-1]
    texts = greedy(pair.target, prompts, n_new)
    guesses = pair.draft(texts[:, :-1])[0].argmax(-1)[:, -n_new:]
    is_match = guesses == texts[:, -n_new:]
    lengths = [acceptance_length(row.tolist(), n_draft) for row in is_match]
    return {"acceptance_length": sum(lengths) / len(lengths), "match": is_match.float().mean().item()}
