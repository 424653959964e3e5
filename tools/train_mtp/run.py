"""One training run: the loss, and what is measured at its end."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from pyspac.errors import UsageError
from pyspac.train.accepted import describe, report
from pyspac.train.corpus import Module, read_modules
from pyspac.train.training import (
    SEED,
    Plan,
    Training,
    check_positive,
    is_out_of_memory,
    what_memory_said,
)
from tools.train_mtp.adapter import GatedLora, choose_mask_ids, forward
from tools.train_mtp.base import Base, load_base
from tools.train_mtp.held_out import guess
from tools.train_mtp.layout import Layout, make_layout
from tools.train_mtp.sampler import Sampler
from tools.train_mtp.texts import Texts, choose_anchors, cut_prompts, load_or_write, write_on

N_PROMPT: Final = 96  # tokens that the model goes on from
N_NEW: Final = 96  # tokens that it writes
N_HELD_OUT: Final = 64
ALONE: Final = 0.3  # weight of the loss without the sampler
LEAST_GAIN: Final = 1.005  # of tokens per step; a sampler below that is left out


class Run(Training):
    """An adapter on its way."""

    texts: Texts
    held_out: Texts

    def __init__(self, base: Base, args: argparse.Namespace) -> None:
        torch.manual_seed(SEED)
        self.base, self.args = base, args
        self.adapter = GatedLora(base, choose_mask_ids(base, args.masks), args.rank)
        self.sampler = Sampler(base.n_vocab).to(base.device)
        self.has_sampler: bool | None = None  # None: not known before the last report
        plan = Plan(
            checkpoint=args.work_dir / "adapter.pt",
            lr=args.lr,
            minutes=args.minutes,
            report_every=args.report_every,
        )
        super().__init__({"adapter": self.adapter, "sampler": self.sampler}, self.sizes_of(base), plan)

    def sizes_of(self, base: Base) -> dict[str, Any]:
        """What an adapter must have in common with a run to go on with it."""
        config = base.model.config
        return {
            "architecture": config.architectures[0],
            "embedding": base.embedding_name,
            "n_layer": config.num_hidden_layers,
            "n_embd": config.hidden_size,
            "n_vocab": base.n_vocab,
            "rank": self.args.rank,
            "mask_ids": self.adapter.mask_ids,
        }

    def saved_too(self) -> dict[str, Any]:
        return {"has_sampler": self.has_sampler}

    def loss(self, generator: torch.Generator) -> Tensor:
        rows = torch.randint(len(self.texts), (self.args.rows,), generator=generator)
        anchors = choose_anchors(self.texts, rows, self.args.masks, self.args.groups, generator)
        layout = make_layout(self.texts.ids[rows], anchors, self.adapter.mask_ids).to(self.base.device)
        return mask_loss(forward(self.base, self.adapter, layout), layout, self.sampler)

    def report(self) -> dict[str, list[float]]:
        return report(guess(self.base, self.adapter, self.held_out, self.sampler))


def mask_loss(logits: Tensor, layout: Layout, sampler: Sampler) -> Tensor:
    """KL divergence, in nats, of the masks' distributions from the model's own at the same place; a mean.

    With the sampler, which is told the token before the guessed one, and with a smaller weight without it, as
    its candidates are a mask's likeliest tokens. `logits` [n_text, n_row, n_vocab] are those of all of the
    layout's tokens: the model's own come out of the same forward, as masks change nothing about them.
    """
    teachers = layout.teachers.flatten(1)
    rows = torch.arange(len(logits), device=logits.device)[:, None]
    wanted = logits.detach()[rows, teachers].flatten(0, 1).float().log_softmax(-1)
    guessed = logits[:, -teachers.shape[1] :].flatten(0, 1).float()
    pairs = sampler.scores(layout.ids[rows, teachers].flatten())
    alone, both = (
        F.kl_div(x.log_softmax(-1), wanted, log_target=True, reduction="batchmean")
        for x in (guessed, guessed + pairs)
    )
    return both + ALONE * alone


def check_args(args: argparse.Namespace) -> None:
    """Raises UsageError for a value that cannot be."""
    if not 1 <= args.masks <= 16:
        raise UsageError(f"--masks is {args.masks}; it must be 1 to 16")
    for name in ("rank", "rows", "groups", "texts", "threads"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name} is {getattr(args, name)}; it must be at least 1")
    if args.groups > N_PROMPT + N_NEW - args.masks:
        raise UsageError(f"--groups is {args.groups}; it must be at most {N_PROMPT + N_NEW - args.masks}")
    for name in ("minutes", "lr", "report_every"):
        check_positive(name.replace("_", "-"), getattr(args, name))
    if not args.model.is_dir():
        raise UsageError(
            f"there is no folder {args.model}; give a Hugging Face folder with the model's weights"
        )
    if args.text and not args.text.exists():
        raise UsageError(f"there is no {args.text}; give a text file or a folder of them: --text")


def held_out_texts(base: Base, modules: list[Module]) -> Texts:
    """Greedy texts behind prompts of the held-out modules, the same in every run."""
    prompts = cut_prompts(base, [m for m in modules if m.is_held_out], N_HELD_OUT, N_PROMPT, SEED + 1)
    texts: Texts = write_on(base, prompts, N_NEW, torch.ones(len(prompts), dtype=torch.bool))
    return texts


def finish(run: Run, held_out: Texts) -> dict[str, Any]:
    """The last report, and whether the sampler helps enough to be part of the adapter."""
    alone, both = (report(guess(run.base, run.adapter, held_out, s)) for s in (None, run.sampler))
    gain = both["tokens_per_step"][-1] / alone["tokens_per_step"][-1]
    run.has_sampler = gain >= LEAST_GAIN
    run.save()
    print(f"without the sampler, {describe(alone)}")
    print(f"with the sampler, {describe(both)}")
    print(f"the sampler is {'kept' if run.has_sampler else 'left out'}: {gain:.3f} times the tokens per step")
    return {"alone": alone, "with_sampler": both, "has_sampler": run.has_sampler}


def train(args: argparse.Namespace) -> int:
    """All of it, as the command line says; the exit code. Raises UsageError."""
    check_args(args)
    try:
        return write_and_learn(args)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        print(f"train_mtp: {too_little_memory(error, args)}", file=sys.stderr)
        return 1


def too_little_memory(error: Exception, args: argparse.Namespace) -> str:
    """What torch said, what takes memory, and which options take less."""
    n_text = N_PROMPT + N_NEW
    return (
        f"the memory is too small: {what_memory_said(error)}. It has to hold the model's weights, and what "
        f"each layer computes for "
        f"--rows {args.rows} * ({n_text} + --groups {args.groups} * --masks {args.masks}) = "
        f"{args.rows * (n_text + args.groups * args.masks)} tokens; give a smaller --groups or --rows "
        "(the run goes on from what was saved), or use a machine with more memory if the weights do not fit"
    )


def write_and_learn(args: argparse.Namespace) -> int:
    """`train`, with arguments that were checked."""
    torch.set_num_threads(args.threads)
    base = load_base(args.model)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    shutil.copy(args.model / "config.json", args.work_dir)  # the converter reads it
    run = Run(base, args)
    modules = read_modules(args.text)
    prompts = cut_prompts(base, [m for m in modules if not m.is_held_out], args.texts, N_PROMPT, SEED)
    texts = load_or_write(base, args.work_dir / "texts.pt", prompts, N_NEW)
    held_out = held_out_texts(base, modules)
    run.texts, run.held_out = texts, held_out
    run.train()
    if run.is_interrupted:
        print(
            f"stopped at {run.progress:.0%}; the same command goes on from here. Now comes the last report, "
            "which decides about the sampler; Ctrl-C leaves it out"
        )
    results = finish(run, held_out) | {"minutes": run.used_s / 60, "step": run.step}
    (args.work_dir / "report.json").write_text(json.dumps(results, indent=2) + "\n")
    return 130 if run.is_interrupted else 0
