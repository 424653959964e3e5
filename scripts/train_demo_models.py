#!/usr/bin/env python3
"""Train the demo pair: in goes the running Python's standard library, out come two Hugging Face folders.

The target is a small mixture of experts (qwen3moe), the draft a smaller dense model (qwen3); both share one
byte-level BPE vocabulary. They are trained together: the target on the text, the draft on the target's
distribution over the same text, so that the draft guesses what the target will say.

    corpus (modules) -> tokenizer -> token stream -> [workers: forward, backward] -> update -> checkpoint
                                                                          -> held-out report -> export

Run it again with the same command to go on from the last checkpoint. Ctrl-C writes one and stops.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import itertools
import json
import os
import re
import signal
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from tqdm import tqdm

EOS = "<|endoftext|>"
SEED = 20240607
N_CTX = 1024  # tokens per training window, and the context both models are made for
ROWS_PER_STEP = 8  # windows per optimiser step, shared among the workers


class UserError(Exception):
    """What the user gave cannot be used; the text says why and what to do."""


def save_atomically(data: object, path: Path) -> None:
    """`torch.save` that leaves either the old file or the new one, never half of one."""
    part = path.with_name(path.name + ".part")
    torch.save(data, part)
    part.replace(path)


# ---------------------------------------------------------------------------------------------------------
# Corpus

LEFT_OUT_DIRS = {"test", "tests", "idle_test", "site-packages", "__pycache__", "pydoc_data"}
GENERATED = re.compile(r"generated (from|by)|gencodec", re.IGNORECASE)
HELD_OUT_ONE_IN = 20


@dataclass(frozen=True, slots=True)
class Module:
    """One source file of the standard library; `name` is its path below the library, with slashes."""

    name: str
    text: str

    @property
    def is_held_out(self) -> bool:
        """Decided by the name alone, so that it is the same on every machine and in every run."""
        return int(hashlib.sha256(self.name.encode()).hexdigest(), 16) % HELD_OUT_ONE_IN == 0


def read_stdlib() -> list[Module]:
    """Every hand-written module of the running Python's standard library, tests left out, sorted by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    modules = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if LEFT_OUT_DIRS.isdisjoint(relative.parts) and not relative.parts[0].startswith("config-"):
            with contextlib.suppress(UnicodeDecodeError):
                modules.append(Module(relative.as_posix(), path.read_text(encoding="utf-8")))
    return [m for m in modules if m.text.strip() and not GENERATED.search(m.text[:400])]


# ---------------------------------------------------------------------------------------------------------
# Tokenizer

# The pre-tokenizer that llama.cpp calls "qwen2": contractions, words with one leading sign, single digits,
# runs of signs with the line ends after them, line ends, and white space up to the last blank.
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] + '\\n' }}{% endfor %}"


def train_tokenizer(texts: list[str], n_vocab: int) -> Tokenizer:
    """Byte-level BPE of exactly `n_vocab` tokens, the last of them the end-of-text token."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=n_vocab - 1, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([EOS])
    assert tokenizer.get_vocab_size() == n_vocab
    return tokenizer


def encode_modules(tokenizer: Tokenizer, modules: list[Module]) -> Tensor:
    """All modules behind one another, an end-of-text token before each: [n_token] int64."""
    eos = tokenizer.token_to_id(EOS)
    ids: list[int] = []
    for encoding in tokenizer.encode_batch([m.text for m in modules]):
        ids += [eos, *encoding.ids]
    return torch.tensor(ids, dtype=torch.int64)


def load_or_make_tokens(work_dir: Path, n_vocab: int) -> tuple[Tensor, Tensor]:
    """(train, held-out) token streams, each [n_token] int64; made once and then kept in `work_dir`."""
    path = work_dir / "tokens.pt"
    if not path.exists():
        modules = read_stdlib()
        train = [m for m in modules if not m.is_held_out]
        held_out = [m for m in modules if m.is_held_out]
        tokenizer = train_tokenizer([m.text for m in train], n_vocab)
        tokenizer.save(str(work_dir / "tokenizer.json"))
        (work_dir / "held_out.txt").write_text("\n".join(m.name for m in held_out) + "\n")
        save_atomically(
            {k: encode_modules(tokenizer, v) for k, v in (("train", train), ("held_out", held_out))}, path
        )
    tokens = torch.load(path)
    if int(tokens["train"].max()) >= n_vocab or tokens["train"][0] != n_vocab - 1:
        raise UserError(f"{path} was made with another --vocab; use another --work-dir or delete it")
    return tokens["train"], tokens["held_out"]


class Windows:
    """Window number k of an endless, shuffled walk over the stream; epoch e shifts the cuts by a new offset.

    Window k depends on (seed, k) only, so a resumed run sees what an unbroken one would have seen.
    """

    def __init__(self, tokens: Tensor, seed: int) -> None:
        self.tokens, self.seed = tokens, seed
        self.n_per_epoch = (len(tokens) - N_CTX - 1) // N_CTX
        self._epoch, self._starts = -1, torch.empty(0, dtype=torch.int64)

    def __call__(self, k: int) -> Tensor:
        """[N_CTX + 1] int64: the window and the token after it."""
        epoch, i = divmod(k, self.n_per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1000 + epoch)
            offset = int(torch.randint(N_CTX, (), generator=generator))
            self._starts = torch.randperm(self.n_per_epoch, generator=generator) * N_CTX + offset
            self._epoch = epoch
        start = int(self._starts[i])
        return self.tokens[start : start + N_CTX + 1]


# ---------------------------------------------------------------------------------------------------------
# Model


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


def matrix(*shape: int, std: float) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * std)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """bfloat16 product with a float32 master weight: [..., n_in] -> [..., n_out]."""
    return F.linear(x, weight.to(x.dtype))


class Permute(torch.autograd.Function):
    """Rows of x in another order; knowing the inverse order makes the backward a gather, not a scatter."""

    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse, order)
        return x[order]

    @staticmethod
    def backward(ctx, grad: Tensor):
        inverse, _ = ctx.saved_tensors
        return grad[inverse], None, None


class GroupedLinear(torch.autograd.Function):
    """Rows sorted by expert, each group times its own weight: [n_row, n_in] x [n_expert, n_out, n_in]."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bounds: list[int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bounds = bounds
        out = x.new_empty(x.shape[0], weight.shape[1])
        for ie, (a, b) in enumerate(itertools.pairwise(bounds)):
            torch.mm(x[a:b], weight[ie].T, out=out[a:b])
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
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


class PairLoss(torch.autograd.Function):
    """Mean cross-entropy of the target on the text and of the draft on a blend of target and text.

    The gradients of both losses by the logits are differences of probabilities, so they are made here in the
    forward: nothing of size [n_row, n_vocab] is computed twice.
    """

    @staticmethod
    def forward(ctx, logits_tgt: Tensor, logits_dft: Tensor, labels: Tensor, share_tgt: float):
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
    def backward(ctx, grad: Tensor, _):
        p, q = ctx.saved_tensors
        return p, q, None, None


# ---------------------------------------------------------------------------------------------------------
# Optimiser


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


# ---------------------------------------------------------------------------------------------------------
# Workers: one process per core, each with its own windows; parameters and gradients live in shared memory


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


def flat_views(flat: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    """The pieces of a flat buffer in the shapes of the parameters."""
    sizes = [p.numel() for p in parameters]
    return [piece.view_as(p) for piece, p in zip(flat.split(sizes), parameters, strict=True)]


def is_muon(name: str, p: Tensor) -> bool:
    return p.ndim > 1 and not name.endswith(("embd", "router"))


def split_work(parameters: list[nn.Parameter], n_worker: int) -> list[set[int]]:
    """Which worker updates which parameter: largest first, each to the worker with least so far."""
    owned: list[set[int]] = [set() for _ in range(n_worker)]
    load = [0] * n_worker
    for i in sorted(range(len(parameters)), key=lambda i: -parameters[i].numel()):
        rank = load.index(min(load))
        owned[rank].add(i)
        load[rank] += parameters[i].numel()
    return owned


@dataclass
class Shared:
    """What all workers see. Flat buffers are [n_parameter] float32; `control` is [progress, step, stop]."""

    params: Tensor
    m: Tensor
    v: Tensor
    grads: list[Tensor]  # one per worker, written by that worker only
    report: Tensor  # [n_worker, 4] float32
    control: Tensor  # float64, written by worker 0 between the barriers only
    tokens: Tensor  # [n_token] int64
    barrier: mp.Barrier
    n_vocab: int

    def state(self) -> dict[str, Tensor]:
        return {"params": self.params, "m": self.m, "v": self.v}


class Worker:
    def __init__(self, rank: int, shared: Shared, optim: OptimConfig) -> None:
        torch.set_num_threads(1)
        keep_freed_memory()
        self.rank, self.shared, self.optim = rank, shared, optim
        self.pair = Pair(shared.n_vocab)
        self.names, self.parameters = map(list, zip(*self.pair.named_parameters(), strict=True))
        self.m, self.v = (flat_views(x, self.parameters) for x in (shared.m, shared.v))
        self.grads = [flat_views(g, self.parameters) for g in shared.grads]
        for p, view, grad in zip(
            self.parameters, flat_views(shared.params, self.parameters), self.grads[rank], strict=True
        ):
            p.data, p.grad = view, grad
        self.owned = split_work(self.parameters, len(shared.grads))[rank]
        self.windows = Windows(shared.tokens, SEED)

    def step(self) -> bool:
        """One optimiser step together with the other workers; False when worker 0 asked to stop."""
        self.shared.barrier.wait(timeout=600)
        progress, step, is_stop = self.shared.control.tolist()
        if is_stop:
            return False
        self.backward(int(step), is_short=progress < self.optim.long_from)
        self.shared.barrier.wait(timeout=600)
        self.update(lr_factor(self.optim, progress), int(step))
        self.shared.barrier.wait(timeout=600)  # worker 0 may now save or report whole parameters
        return True

    def backward(self, step: int, is_short: bool) -> None:
        n_worker = len(self.shared.grads)
        self.shared.grads[self.rank].zero_()
        rows = [self.windows(step * ROWS_PER_STEP + i) for i in range(self.rank, ROWS_PER_STEP, n_worker)]
        batch = torch.stack(rows)
        n_token = N_CTX // 2 if is_short else N_CTX
        ids, labels = (x.reshape(-1, n_token) for x in (batch[:, :-1], batch[:, 1:]))
        loss, self.shared.report[self.rank] = self.pair.losses(ids, labels, self.optim)
        (loss * (len(rows) / ROWS_PER_STEP)).backward()

    @torch.no_grad()
    def update(self, factor: float, step: int) -> None:
        for i in sorted(self.owned):
            p, m = self.parameters[i].data, self.m[i]
            g = sum(grads[i] for grads in self.grads)
            if is_muon(self.names[i], p):
                update_muon(p, g, m, self.optim, factor)
            else:
                update_adam(p, g, m, self.v[i], self.optim, factor, step)


def keep_freed_memory() -> None:
    """Ask glibc to reuse freed blocks rather than hand them back: the page faults cost a third of a step."""
    m_trim_threshold, m_mmap_max, m_arena_max = -1, -4, -8
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in ((m_mmap_max, 0), (m_trim_threshold, 2**31 - 1), (m_arena_max, 1)):
            mallopt(option, value)


def worker_main(rank: int, shared: Shared, optim: OptimConfig) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # worker 0 hears it and asks everybody to stop
    worker = Worker(rank, shared, optim)
    while worker.step():
        pass


def make_shared(tokens: Tensor, n_vocab: int, n_worker: int) -> Shared:
    torch.manual_seed(SEED)
    start = torch.cat([p.data.flatten() for p in Pair(n_vocab).parameters()])
    zeros = [torch.zeros_like(start) for _ in range(2 + n_worker)]
    for x in (start, tokens, *zeros):
        x.share_memory_()
    return Shared(
        params=start,
        m=zeros[0],
        v=zeros[1],
        grads=zeros[2:],
        tokens=tokens,
        n_vocab=n_vocab,
        report=torch.zeros(n_worker, 4).share_memory_(),
        control=torch.zeros(3, dtype=torch.float64).share_memory_(),
        barrier=mp.get_context("spawn").Barrier(n_worker),
    )


# ---------------------------------------------------------------------------------------------------------
# Held-out report


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


# ---------------------------------------------------------------------------------------------------------
# Export: Hugging Face folders


def hf_config(c: ModelConfig, eos_id: int) -> dict[str, object]:
    """`config.json` as Qwen3ForCausalLM or Qwen3MoeForCausalLM reads it."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM" if c.n_expert else "Qwen3ForCausalLM"],
        "model_type": "qwen3_moe" if c.n_expert else "qwen3",
        "vocab_size": c.n_vocab,
        "hidden_size": c.n_embd,
        "num_hidden_layers": c.n_layer,
        "num_attention_heads": c.n_head,
        "num_key_value_heads": c.n_head_kv,
        "head_dim": c.head_dim,
        "intermediate_size": c.n_ff,
        "hidden_act": "silu",
        "rms_norm_eps": c.rms_eps,
        "rope_theta": c.rope_theta,
        "max_position_embeddings": N_CTX,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "torch_dtype": "float32",
        "eos_token_id": eos_id,
        "bos_token_id": eos_id,
    }
    if c.n_expert:
        config |= {
            "num_experts": c.n_expert,
            "num_experts_per_tok": c.n_expert_used,
            "moe_intermediate_size": c.n_ff,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return config


def hf_ffn(ffn: DenseFfn | MoeFfn) -> Iterator[tuple[str, Tensor]]:
    if isinstance(ffn, DenseFfn):
        yield from (("gate_proj", ffn.gate_up[0]), ("up_proj", ffn.gate_up[1]), ("down_proj", ffn.down))
        return
    yield "gate", ffn.router
    for ie in range(ffn.n_expert):
        yield f"experts.{ie}.gate_proj", ffn.gate_up[ie, 0]
        yield f"experts.{ie}.up_proj", ffn.gate_up[ie, 1]
        yield f"experts.{ie}.down_proj", ffn.down[ie]


def hf_tensors(model: Model) -> Iterator[tuple[str, Tensor]]:
    """Every weight under its Hugging Face name."""
    yield "model.embed_tokens.weight", model.embd
    yield "model.norm.weight", model.norm
    for il, block in enumerate(model.blocks):
        at, attn = f"model.layers.{il}", block.attn
        yield f"{at}.input_layernorm.weight", block.attn_norm
        yield f"{at}.post_attention_layernorm.weight", block.ffn_norm
        for name in "qkvo":
            yield f"{at}.self_attn.{name}_proj.weight", getattr(attn, name)
        for name in ("q_norm", "k_norm"):
            yield f"{at}.self_attn.{name}.weight", getattr(attn, name)
        for name, weight in hf_ffn(block.ffn):
            yield f"{at}.mlp.{name}.weight", weight


def export_hf(model: Model, tokenizer: Tokenizer, folder: Path) -> None:
    """config.json, model.safetensors (float32) and the tokenizer's files."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: p.detach().clone().contiguous() for name, p in hf_tensors(model)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "bos_token": None,
        "unk_token": None,
        "pad_token": EOS,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": N_CTX,
        "chat_template": CHAT_TEMPLATE,
    }
    for name, content in (
        ("config.json", hf_config(model.c, tokenizer.token_to_id(EOS))),
        ("tokenizer_config.json", tokenizer_config),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


# ---------------------------------------------------------------------------------------------------------
# The run


@dataclass
class Clock:
    """Progress through the time budget, counted in seconds of training only, kept across restarts."""

    budget_s: float
    used_s: float = 0.0
    step: int = 0

    @property
    def progress(self) -> float:
        return min(1.0, self.used_s / self.budget_s)


class Run:
    """Worker 0 and what only it does: the clock, checkpoints, reports."""

    def __init__(self, work_dir: Path, tokens: tuple[Tensor, Tensor], args: argparse.Namespace) -> None:
        self.work_dir, self.args, self.held_out = work_dir, args, tokens[1]
        self.optim, self.clock = OptimConfig(), Clock(args.minutes * 60)
        self.shared = make_shared(tokens[0], args.vocab, args.workers)
        self.is_interrupted = False
        self.resume()

    @property
    def checkpoint(self) -> Path:
        return self.work_dir / "checkpoint.pt"

    def resume(self) -> None:
        if not self.checkpoint.exists():
            return
        saved = torch.load(self.checkpoint)
        if saved["n_vocab"] != self.args.vocab or len(saved["params"]) != len(self.shared.params):
            raise UserError(f"{self.checkpoint} holds another model; use another --work-dir or delete it")
        for name, buffer in self.shared.state().items():
            buffer.copy_(saved[name])
        self.clock.used_s, self.clock.step = saved["used_s"], saved["step"]

    def save(self) -> None:
        state = {"n_vocab": self.args.vocab, "used_s": self.clock.used_s, "step": self.clock.step}
        save_atomically(state | self.shared.state(), self.checkpoint)

    def train(self) -> None:
        """Until the budget is used or Ctrl-C; leaves a checkpoint either way."""
        spawn = mp.get_context("spawn")
        others = [
            spawn.Process(target=worker_main, args=(r, self.shared, self.optim), daemon=True)
            for r in range(1, self.args.workers)
        ]
        for process in others:
            process.start()
        self.worker = Worker(0, self.shared, self.optim)
        signal.signal(signal.SIGINT, self.interrupt)
        self.loop()
        self.save()
        for process in others:
            process.join(timeout=60)

    def interrupt(self, *_: object) -> None:
        self.is_interrupted = True

    def loop(self) -> None:
        next_save = next_report = self.clock.used_s + 60
        with tqdm(
            total=int(self.clock.budget_s),
            initial=int(self.clock.used_s),
            unit="s",
            desc="training",
            mininterval=5,
        ) as bar:
            while self.advance():
                bar.update(int(self.clock.used_s) - bar.n)
                if self.clock.used_s >= next_report:
                    self.report(bar)
                    next_report += self.args.report_every * 60
                if self.clock.used_s >= next_save:
                    self.save()
                    next_save += 180

    def advance(self) -> bool:
        """One timed step; False at the end of the budget or after Ctrl-C."""
        is_over = self.clock.progress >= 1 or self.is_interrupted
        self.shared.control.copy_(torch.tensor([self.clock.progress, self.clock.step, is_over]))
        start = time.monotonic()
        if not self.worker.step():
            return False
        self.clock.used_s += time.monotonic() - start
        self.clock.step += 1
        return True

    def report(self, bar: tqdm) -> None:
        train_tgt, train_dft, *_ = self.shared.report.mean(0).tolist()
        row = {
            "minutes": self.clock.used_s / 60,
            "step": self.clock.step,
            "n_token": self.clock.step * ROWS_PER_STEP * N_CTX,
            "train_target": train_tgt,
            "train_draft": train_dft,
            **held_out_report(self.worker.pair, self.held_out),
        }
        row = {k: round(v, 4) for k, v in row.items()}
        with (self.work_dir / "log.jsonl").open("a") as log:
            log.write(json.dumps(row) + "\n")
        bar.write("  ".join(f"{k} {v:g}" for k, v in row.items()))


def export(work_dir: Path, pair: Pair, held_out: Tensor, clock: Clock) -> dict[str, object]:
    """Both folders and `report.json`; returns the report."""
    tokenizer = Tokenizer.from_file(str(work_dir / "tokenizer.json"))
    report = {
        "minutes": round(clock.used_s / 60, 1),
        "step": clock.step,
        "python": sys.version.split()[0],
        "n_token": clock.step * ROWS_PER_STEP * N_CTX,
        **held_out_report(pair, held_out, n_window=128),
        **speculative_report(pair, held_out),
    }
    for name, model in (("demo-moe", pair.target), ("demo-draft", pair.draft)):
        export_hf(model, tokenizer, work_dir / name)
        report[name] = asdict(model.c) | {"n_parameter": sum(p.numel() for p in model.parameters())}
    (work_dir / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    return report


def load_pair(shared: Shared) -> Pair:
    pair = Pair(shared.n_vocab)
    parameters = list(pair.parameters())
    for p, view in zip(parameters, flat_views(shared.params, parameters), strict=True):
        p.data = view
    return pair


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="""examples:
  train_demo_models.py                          a full run: 30 minutes, made for 2 free cores
  train_demo_models.py --minutes 10             a quick, worse pair
  train_demo_models.py --export-only            write the folders from the last checkpoint
  then, for each of demo-moe and demo-draft:
  convert_to_gguf.py build/demo-models/demo-moe pyspac/models/demo-moe.gguf --quant Q4_K_M""",
    )
    parser.add_argument(
        "--work-dir",
        type=Path,
        default=Path("build/demo-models"),
        metavar="DIR",
        help="tokenizer, checkpoint, log, results; kept between runs (default: %(default)s)",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=30,
        help="training time; the learning rate reaches zero at its end (default: %(default)s)",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=os.cpu_count() or 1,
        help=f"one-thread processes, at most {ROWS_PER_STEP} (default: all %(default)s cores)",
    )
    parser.add_argument("--vocab", type=int, default=3072, help="vocabulary size (default: %(default)s)")
    parser.add_argument(
        "--report-every",
        type=float,
        default=3,
        metavar="MINUTES",
        help="held-out losses and expert balance (default: %(default)s)",
    )
    parser.add_argument("--export-only", action="store_true", help="no training: export the last checkpoint")
    return parser.parse_args(argv)


def check_args(args: argparse.Namespace) -> None:
    if args.minutes <= 0:
        raise UserError(f"--minutes is {args.minutes:g}; it must be more than 0")
    if not 1 <= args.workers <= ROWS_PER_STEP:
        raise UserError(f"--workers is {args.workers}; it must be 1 to {ROWS_PER_STEP}")
    if not 512 <= args.vocab <= 65536:
        raise UserError(f"--vocab is {args.vocab}; it must be 512 to 65536")
    if args.export_only and not (args.work_dir / "checkpoint.pt").exists():
        raise UserError(f"no checkpoint.pt in {args.work_dir}; train first, without --export-only")


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        check_args(args)
        torch.set_num_threads(1)  # on a busy machine, threads that wait for one another lose most
        args.work_dir.mkdir(parents=True, exist_ok=True)
        tokens = load_or_make_tokens(args.work_dir, args.vocab)
        print(f"{len(tokens[0]):,} training tokens, {len(tokens[1]):,} held out")
        run = Run(args.work_dir, tokens, args)
        if not args.export_only and run.clock.progress < 1:
            run.train()
        if run.is_interrupted:
            print(f"stopped at {run.clock.progress:.0%}; the same command goes on from here")
            return 130
        print(json.dumps(export(args.work_dir, load_pair(run.shared), tokens[1], run.clock), indent=2))
    except UserError as error:
        print(f"train_demo_models: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
