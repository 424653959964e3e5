"""One training run: the loss, the clock, checkpoints, and what Ctrl-C does."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from tools.train_demo.common import UserError, save_atomically
from tools.train_demo.corpus import Module
from tools.train_mtp.adapter import GatedLora, choose_mask_ids, forward
from tools.train_mtp.base import Base, load_base
from tools.train_mtp.held_out import guess, report
from tools.train_mtp.layout import Layout, make_layout
from tools.train_mtp.sampler import Sampler
from tools.train_mtp.texts import (
    Texts,
    choose_anchors,
    cut_prompts,
    load_checkpoint,
    load_or_write,
    read_modules,
    write_on,
)

SEED: Final = 1
N_PROMPT: Final = 96  # tokens that the model goes on from
N_NEW: Final = 96  # tokens that it writes
N_HELD_OUT: Final = 64
ALONE: Final = 0.3  # weight of the loss without the sampler
LEAST_GAIN: Final = 1.005  # of tokens per step; a sampler below that is left out
WARM_UP: Final = 0.03  # share of the time


class Run:
    """An adapter on its way: what a checkpoint holds, and what makes the next one."""

    def __init__(self, base: Base, args: argparse.Namespace) -> None:
        torch.manual_seed(SEED)
        self.base, self.args = base, args
        self.adapter = GatedLora(base, choose_mask_ids(base, args.masks), args.rank)
        self.sampler = Sampler(base.n_vocab).to(base.device)
        self.parameters = [*self.adapter.parameters(), *self.sampler.parameters()]
        self.optim = torch.optim.AdamW(self.parameters, lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01)
        self.used_s, self.step, self.is_interrupted = 0.0, 0, False
        self.has_sampler: bool | None = None  # None: not known before the last report
        self.resume()

    @property
    def checkpoint(self) -> Path:
        path: Path = self.args.work_dir / "adapter.pt"
        return path

    @property
    def progress(self) -> float:
        return float(min(1.0, self.used_s / (self.args.minutes * 60)))

    def resume(self) -> None:
        if not self.checkpoint.exists():
            return
        saved = load_checkpoint(self.checkpoint, self.base.device)
        if saved["sizes"] != self.sizes():
            raise UserError(
                f"{self.checkpoint} is an adapter for {saved['sizes']}, and this run is for {self.sizes()}; "
                "use another --work-dir or delete that file"
            )
        self.adapter.load_state_dict(saved["adapter"])
        self.sampler.load_state_dict(saved["sampler"])
        self.optim.load_state_dict(saved["optim"])
        self.used_s, self.step = saved["used_s"], saved["step"]

    def sizes(self) -> dict[str, Any]:
        """What an adapter must have in common with a run to go on with it."""
        config = self.base.model.config
        return {
            "architecture": config.architectures[0],
            "embedding": self.base.embedding_name,
            "n_layer": config.num_hidden_layers,
            "n_embd": config.hidden_size,
            "n_vocab": self.base.n_vocab,
            "rank": self.args.rank,
            "mask_ids": self.adapter.mask_ids,
        }

    def save(self) -> None:
        """A checkpoint, in place of the last one. Raises UserError where the training has diverged."""
        if not all(parameter.isfinite().all() for parameter in self.parameters):
            raise UserError(
                f"the adapter's numbers are not finite after {self.step} steps: give a smaller --lr than "
                f"{self.args.lr:g}; the last checkpoint is as it was"
            )
        state = {
            "sizes": self.sizes(),
            "adapter": self.adapter.state_dict(),
            "optim": self.optim.state_dict(),
            "sampler": self.sampler.state_dict(),
            "has_sampler": self.has_sampler,
            "used_s": self.used_s,
            "step": self.step,
        }
        save_atomically(state, self.checkpoint)

    def train(self, texts: Texts, held_out: Texts) -> None:
        """Until the time is used or Ctrl-C; leaves a checkpoint either way."""
        usual = signal.signal(signal.SIGINT, self.interrupt)
        next_save, next_report = self.used_s + 60, self.used_s + self.args.report_every * 60
        total = int(self.args.minutes * 60)
        with tqdm(total=total, initial=int(self.used_s), unit="s", desc="training", mininterval=5) as bar:
            while self.progress < 1 and not self.is_interrupted:
                start = time.monotonic()
                loss = self.learn(texts)
                self.used_s += time.monotonic() - start
                bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
                bar.update(min(int(self.used_s), total) - bar.n)
                if self.used_s >= next_save:
                    self.save()
                    next_save += 60
                if self.used_s >= next_report:
                    bar.write(self.log(report(guess(self.base, self.adapter, held_out, self.sampler)), loss))
                    next_report += self.args.report_every * 60
        self.save()
        signal.signal(signal.SIGINT, usual)

    def interrupt(self, *_: object) -> None:
        self.is_interrupted = True

    def learn(self, texts: Texts) -> float:
        """One step of the optimiser on texts and anchors that the step's number decides; its loss."""
        for group in self.optim.param_groups:
            group["lr"] = self.args.lr * max(0.01, min(self.progress / WARM_UP, 1.0, 1 - self.progress))
        generator = torch.Generator().manual_seed(SEED + self.step)
        rows = torch.randint(len(texts), (self.args.rows,), generator=generator)
        anchors = choose_anchors(texts, rows, self.args.masks, self.args.groups, generator)
        layout = make_layout(texts.ids[rows], anchors, self.adapter.mask_ids).to(self.base.device)
        loss = mask_loss(forward(self.base, self.adapter, layout), layout, self.sampler)
        if not loss.isfinite():
            raise UserError(
                f"the loss is {float(loss.detach())} after {self.step} steps: give a smaller --lr than "
                f"{self.args.lr:g}; the same command goes on from the last checkpoint"
            )
        self.optim.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optim.step()
        self.step += 1
        return float(loss.detach())

    def log(self, row: dict[str, Any], loss: float) -> str:
        """Append to log.jsonl; the same as a line to read."""
        row = {"minutes": self.used_s / 60, "step": self.step, "loss": loss, **row}
        with (self.args.work_dir / "log.jsonl").open("a") as log:
            log.write(json.dumps(row) + "\n")
        return f"{row['minutes']:.1f} min, step {self.step}, loss {loss:.3f}: {describe(row)}"


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


def describe(row: dict[str, Any]) -> str:
    numbers = {
        name: " ".join(f"{x:.3f}" for x in row[name]) for name in ("right", "accepted", "tokens_per_step")
    }
    return (
        f"held out, by mask: right {numbers['right']}, accepted {numbers['accepted']}; "
        f"tokens per step with 1, 2 ... masks: {numbers['tokens_per_step']}"
    )


def check_args(args: argparse.Namespace) -> None:
    """Raises UserError for a value that cannot be."""
    if not 1 <= args.masks <= 16:
        raise UserError(f"--masks is {args.masks}; it must be 1 to 16")
    for name in ("rank", "rows", "groups", "texts", "threads"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} is {getattr(args, name)}; it must be at least 1")
    if args.groups > N_PROMPT + N_NEW - args.masks:
        raise UserError(f"--groups is {args.groups}; it must be at most {N_PROMPT + N_NEW - args.masks}")
    for name in ("minutes", "lr", "report_every"):
        if not 0 < getattr(args, name) < math.inf:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(args, name):g}; it must be more than 0")
    if not args.model.is_dir():
        raise UserError(
            f"there is no folder {args.model}; give a Hugging Face folder with the model's weights"
        )
    if args.text and not args.text.exists():
        raise UserError(f"there is no {args.text}; give a text file or a folder of them: --text")


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
    """All of it, as the command line says; the exit code. Raises UserError."""
    check_args(args)
    try:
        return write_and_learn(args)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        print(f"train_mtp: {too_little_memory(error, args)}", file=sys.stderr)
        return 1


def is_out_of_memory(error: Exception) -> bool:
    """torch has a class of its own for a GPU's memory alone; the CPU's is a RuntimeError like any other."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def too_little_memory(error: Exception, args: argparse.Namespace) -> str:
    """What torch said, what takes memory, and which options take less."""
    n_text = N_PROMPT + N_NEW
    said = ". ".join(str(error).split(". ")[:2]) or type(error).__name__
    return (
        f"the memory is too small: {said}. It has to hold the model's weights, and what each layer computes "
        f"for --rows {args.rows} * ({n_text} + --groups {args.groups} * --masks {args.masks}) = "
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
    run.train(texts, held_out)
    if run.is_interrupted:
        print(
            f"stopped at {run.progress:.0%}; the same command goes on from here. Now comes the last report, "
            "which decides about the sampler; Ctrl-C leaves it out"
        )
    results = finish(run, held_out) | {"minutes": run.used_s / 60, "step": run.step}
    (args.work_dir / "report.json").write_text(json.dumps(results, indent=2) + "\n")
    return 130 if run.is_interrupted else 0
