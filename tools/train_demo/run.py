"""The run: worker 0 and what only it does, which is the clock, checkpoints, reports and the export."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.multiprocessing as mp
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from pyspac.train.training import save_atomically
from tools.train_demo.common import N_CTX, ROWS_PER_STEP, UserError
from tools.train_demo.data import load_or_make_tokens
from tools.train_demo.distillation import Pair
from tools.train_demo.export import export_hf
from tools.train_demo.held_out import held_out_report, speculative_report
from tools.train_demo.optimiser import OptimConfig
from tools.train_demo.workers import Shared, Worker, flat_views, make_shared, worker_main


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


def check_args(args: argparse.Namespace) -> None:
    """Raises UserError for a value that cannot be."""
    if args.minutes <= 0:
        raise UserError(f"--minutes is {args.minutes:g}; it must be more than 0")
    if not 1 <= args.workers <= ROWS_PER_STEP:
        raise UserError(f"--workers is {args.workers}; it must be 1 to {ROWS_PER_STEP}")
    if not 512 <= args.vocab <= 65536:
        raise UserError(f"--vocab is {args.vocab}; it must be 512 to 65536")
    if args.export_only and not (args.work_dir / "checkpoint.pt").exists():
        raise UserError(f"no checkpoint.pt in {args.work_dir}; train first, without --export-only")


def train_and_export(args: argparse.Namespace) -> int:
    """All of it, as the command line says; the exit code. Raises UserError."""
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
    return 0
