"""All of `pyspac train-head`: a model's GGUF and some text in, its EAGLE-3 head out.

The model continues pieces of the text, half greedily, half at temperature 1; three layers' inputs and the
N_TOP likeliest next tokens are kept. The head learns the model's predictions (KL divergence), unrolling
N_UNROLL drafts on its own states. Embeddings and outputs stay the model's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from pyspac.errors import ModelError, PyspacError, UsageError
from pyspac.forward.loading import Loading
from pyspac.forward.options import ForwardOptions
from pyspac.forward.runner import Runner
from pyspac.model.draft_files import STATE_ARCHITECTURES
from pyspac.model.gguf_header import GgufHeader, read_header
from pyspac.train import capture
from pyspac.train.accepted import describe, report
from pyspac.train.captured import About, Captured, Rows, digest
from pyspac.train.corpus import Module, read_modules
from pyspac.train.head import DECAY, N_LAYERS, Head, divergence
from pyspac.train.head_file import ARCHITECTURE, choose_layers, choose_shape, read_shared, write_head
from pyspac.train.training import SEED, Plan, Training, check_positive, is_out_of_memory, what_memory_said

N_HELD_OUT: Final = 64  # texts
N_TOP: Final = 64
N_UNROLL: Final = 3  # drafts that learn
N_REPORT: Final = 5  # drafts that the report counts
ROWS: Final = 8  # held-out texts that are computed at a time
SMALL: Final = 256  # width of a model for which the learning rate is that of a small one
SMALL_RATE: Final = 1.5e-3


@dataclass(frozen=True, kw_only=True)
class HeadOptions:
    """What `pyspac train-head` was asked for; `run`: how the model runs."""

    run: ForwardOptions
    output: Path
    text: Path | None  # a file or a folder; None: Python's standard library
    work_dir: Path
    n_text: int
    n_token: int  # of each text, half of which the model writes
    rows: int  # texts per step of the optimiser
    lr: float | None  # None: by the model's width
    minutes: float
    steps: int | None
    report_every: float

    def check(self) -> GgufHeader:
        """The model's header. Raises a PyspacError for what cannot be, before anything is loaded."""
        for name, value in (
            ("texts", self.n_text),
            ("rows", self.rows),
            ("steps", 1 if self.steps is None else self.steps),
        ):
            if value < 1:
                raise UsageError(f"--{name} is {value}; it must be at least 1")
        for name, rate in (("minutes", self.minutes), ("report-every", self.report_every)):
            check_positive(name, rate)
        if self.lr is not None:
            check_positive("lr", self.lr)
        if self.n_token < (least := 2 * (N_REPORT + 1)):
            raise UsageError(f"-c is {self.n_token}; it must be at least {least}")
        if self.text and not self.text.exists():
            raise UsageError(f"there is no {self.text}; give a text file or a folder of them: -f")
        header = Loading.of(self.run).preflight.header
        if not header.metadata.get("tokenizer.ggml.tokens"):
            raise ModelError(f"{header.path}: this file has no vocabulary; give the model's own GGUF file")
        if header.architecture not in STATE_ARCHITECTURES:
            raise ModelError(
                f"{header.path}: a head reads hidden states, which llama.cpp does not hand out for the "
                f"architecture {header.architecture}; it does for {', '.join(STATE_ARCHITECTURES)}"
            )
        check_replaceable(self.output)
        check_work_dir(self.work_dir)
        return header


def check_replaceable(path: Path) -> None:
    """Raise UsageError unless a head may be written there: in place of nothing, or of a head."""
    if not path.exists():
        return
    try:
        is_head = path.is_file() and read_header(path).architecture == ARCHITECTURE
    except PyspacError:
        is_head = False
    if not is_head:
        raise UsageError(f"{path} is no head that could be replaced; give another file: -o")


def check_work_dir(folder: Path) -> None:
    """Raise UsageError where a folder holds anything but a run's files."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is no folder; give another one: --work-dir")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "texts").is_dir():
        raise UsageError(f"{folder} holds other files; give an empty folder, or a new one: --work-dir")
    if not os.access(folder if folder.exists() else folder.absolute().parent, os.W_OK):
        raise UsageError(f"{folder} cannot be written to; give another folder: --work-dir")


@dataclass(frozen=True)
class Texts:
    """To learn from, and to measure on."""

    train: Captured
    held_out: Captured


def train_head(options: HeadOptions) -> dict[str, Any]:
    """Write the head; what came of it, `interrupted` by Ctrl-C or not. Raises a PyspacError."""
    header = options.check()
    try:
        return write_and_learn(options, header)
    except OSError as error:  # a full disk
        where = error.filename or options.work_dir
        raise PyspacError(
            f"{where}: {error.strerror}; the same command goes on from what was saved"
        ) from error
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise PyspacError(
            f"the memory is too small: {what_memory_said(error)}. A step holds {N_UNROLL} predictions of the "
            f"whole vocabulary for --rows {options.rows} * {options.n_token // 2} tokens; give a smaller "
            "--rows (the run goes on from what was saved)"
        ) from error


def write_and_learn(options: HeadOptions, header: GgufHeader) -> dict[str, Any]:
    """`train_head`, with options that were checked."""
    texts = write_texts(options, header, read_modules(options.text))
    torch.set_num_threads(options.run.n_threads or torch.get_num_threads())
    training = HeadTraining(options, header, texts)
    training.train()
    found = training.report()
    write_head(options.output, training.head, header, texts.train.about.layers)
    print(describe(found), file=sys.stderr)
    sizes = {"n_parameters": sum(p.numel() for p in training.parameters)}
    state = {"step": training.step, "minutes": training.used_s / 60, "interrupted": training.is_interrupted}
    return {"output": str(options.output), **sizes, **state, **found}


def write_texts(options: HeadOptions, header: GgufHeader, modules: Sequence[Module]) -> Texts:
    """The model's texts, as far as they are not there yet; it is loaded where some are missing."""
    n_prompt = options.n_token // 2
    n_vocab = len(header.metadata["tokenizer.ggml.tokens"])
    about = About(
        model=f"{header.path.name}, {sum(t.n_bytes for t in header.tensors)} bytes",
        n_embd=int(header.get("embedding_length")),
        layers=choose_layers(int(header.get("block_count")) - int(header.get("nextn_predict_layers", 0))),
        n_prompt=n_prompt,
        n_new=options.n_token - n_prompt,
        n_top=min(N_TOP, n_vocab),
        corpus=digest([m.text for m in modules]),
    )
    folder = options.work_dir / "texts"
    texts = Texts(*(Captured(folder / name, about) for name in ("train", "held-out")))
    if len(texts.train) >= options.n_text and len(texts.held_out) >= N_HELD_OUT:
        return texts
    parts = {False: (texts.train, options.n_text), True: (texts.held_out, N_HELD_OUT)}
    with Runner(options.run) as runner:
        for is_held_out, (captured, n_text) in parts.items():
            chosen = [m for m in modules if m.is_held_out == is_held_out]
            prompts = capture.cut_prompts(runner, chosen, n_text, n_prompt, SEED + is_held_out)
            write(runner, captured, prompts, is_held_out=is_held_out)
    return texts


def write(runner: Runner, captured: Captured, prompts: capture.Ids, *, is_held_out: bool) -> None:
    """With a progress bar; held-out texts are greedy."""
    name = "held-out texts" if is_held_out else "texts"
    with tqdm(total=len(prompts), initial=len(captured), unit="text", desc=f"writing {name}") as bar:
        capture.write(runner, captured, prompts, greedy=is_held_out, on_texts=lambda n: bar.update(n - bar.n))


class HeadTraining(Training):
    """A head on its way."""

    def __init__(self, options: HeadOptions, header: GgufHeader, texts: Texts) -> None:
        torch.manual_seed(SEED)
        self.options, self.texts = options, texts
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.about = texts.train.about
        shape = choose_shape(header)
        scale = torch.tensor(usual_sizes(texts.train.rows(slice(capture.N_TEXTS))))
        self.head = Head(shape, read_shared(header, self.device), scale).to(self.device)
        plan = Plan(
            checkpoint=options.work_dir / "head.pt",
            lr=options.lr or SMALL_RATE * (SMALL / max(SMALL, shape.n_embd)) ** 0.5,
            minutes=options.minutes,
            steps=options.steps,
            report_every=options.report_every,
        )
        super().__init__({"head": self.head}, {"model": self.about.model, "layers": self.about.layers}, plan)

    def loss(self, generator: torch.Generator) -> Tensor:
        """Of the next N_UNROLL drafts behind all places of some texts, the later ones with less weight."""
        n_text = min(len(self.texts.train), self.options.n_text)
        chosen = torch.randint(n_text, (self.options.rows,), generator=generator).sort().values
        rows = self.texts.train.rows(chosen.numpy())
        top_ids, top_logs = self._here(rows.top_ids).long(), self._here(rows.top_logs).float()
        total = torch.zeros((), device=self.device)
        for j, logits in enumerate(self._drafts(rows, N_UNROLL)):
            total = total + DECAY**j * divergence(logits, top_ids[:, j:], top_logs[:, j:])
        return total

    @torch.no_grad()
    def report(self) -> dict[str, list[float]]:
        """Drafts behind each written token, against what the model wrote."""
        right = []
        for first in range(0, N_HELD_OUT, ROWS):
            rows = self.texts.held_out.rows(slice(first, min(first + ROWS, N_HELD_OUT)))
            ids = torch.from_numpy(rows.ids).long()
            n_start = self.about.n_new - N_REPORT
            found = [logits.argmax(-1).cpu() for logits in self._drafts(rows, N_REPORT, is_behind=1)]
            n_prompt = self.about.n_prompt
            right.append(
                torch.stack(
                    [
                        guess[:, :n_start] == ids[:, n_prompt + 1 + j : n_prompt + 1 + j + n_start]
                        for j, guess in enumerate(found)
                    ],
                    -1,
                )
            )
        return report(torch.cat(right))

    def _drafts(self, rows: Rows, n_draft: int, is_behind: int = 0) -> Any:
        """From the prompt's end on; `is_behind`: from so many tokens later on."""
        ids, states = self._here(rows.ids).long(), self._here(rows.states)
        return self.head.drafts(ids, states, self.about.n_prompt - 2 + is_behind, n_draft)

    def _here(self, array: Any) -> Tensor:
        return torch.from_numpy(array).to(self.device)


def usual_sizes(rows: Rows) -> Any:
    """Of each layer's states: the median, over tokens, of the root of their mean square. [N_LAYERS]."""
    squares = np.square(rows.states.astype(np.float32)).mean(-1)
    sizes = np.median(np.sqrt(squares).reshape(-1, N_LAYERS), axis=0)
    return np.maximum(sizes, 1e-6).astype(np.float32)
