"""`pyspac profile --sequences ... --contexts ...`: where to measure, and the table of what was found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from rich.console import Console
from rich.table import Table

from pyspac.checks import check_int
from pyspac.errors import ConfigError, UsageError
from pyspac.forward.options import DEFAULT_N_CTX
from pyspac.forward.runner import Runner
from pyspac.forward.sweeper import Sweeper, n_tokens_needed
from pyspac.model.checks import check_model_file
from pyspac.model.geometry import read_geometry
from pyspac.speculation.sweep import Sweep

SWEPT_WIDTHS: Final = (1, 2, 3, 5, 9, 16)  # tokens of each sequence in a pass
MAX_SEQUENCES: Final = 32  # times the widest of these: a batch that llama.cpp computes at once, 512 tokens
MAX_CONTEXT: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Places:
    """Where tau(n) is measured."""

    sequences: list[int]
    contexts: list[int]
    widths: list[int]
    n_rounds: int

    @classmethod
    def parse(cls, sequences: str, contexts: str, width_max: int, n_rounds: int) -> Self:
        """From the texts of both options. Raises ConfigError."""
        widths = [n for n in SWEPT_WIDTHS if n < width_max] + [width_max]
        return cls(
            _numbers("--sequences", sequences, MAX_SEQUENCES),
            _numbers("--contexts", contexts, MAX_CONTEXT),
            widths,
            n_rounds,
        )

    @property
    def n_ctx(self) -> int:
        """Tokens of each sequence."""
        return n_tokens_needed(max(self.contexts), self.n_rounds, max(self.widths))

    @property
    def max_batch(self) -> int:
        return max(self.sequences) * max(self.widths)

    def check_fits(self, model: Path) -> None:
        """Raise ConfigError if the model's context is shorter."""
        n_train = read_geometry(check_model_file(model)).n_ctx_train or DEFAULT_N_CTX
        if self.n_ctx > n_train:
            longest = max(self.contexts)
            wanted = f"at most {n_train - (self.n_ctx - longest)}: this model's context has {n_train} tokens"
            raise ConfigError("--contexts", longest, f"{wanted}, and the measurements need some of them")

    def measure(self, runner: Runner, tokens: list[int], progress: Any) -> Sweep:
        sweeper = Sweeper(
            runner,
            widths=self.widths,
            sequences=self.sequences,
            contexts=self.contexts,
            n_rounds=self.n_rounds,
        )
        return sweeper.run(tokens, report_rounds(progress, self.n_rounds * len(self.contexts)))


def check_has_effect(draft: Path | str | None, contexts: str | None, prompt_tokens: int | None) -> None:
    """Raise UsageError for what says nothing beside a sweep; `draft`: a file, or a name on a hub."""
    if draft is not None:
        flag = "-md" if isinstance(draft, Path) else "-hfd"
        raise UsageError(
            f"{flag} {draft} has no effect beside --sequences and --contexts, which measure only the model: "
            "leave it out"
        )
    if contexts is not None and prompt_tokens is not None:
        raise UsageError(
            f"--prompt-tokens {prompt_tokens} and --contexts {contexts} say the same: give one of them"
        )


def report_rounds(progress: Any, n_rounds: int) -> Callable[[int], None]:
    """What is told the rounds done; raises KeyboardInterrupt if `progress` says so."""

    def on_round(n_done: int) -> None:
        if not progress("measurements", n_done / n_rounds):
            raise KeyboardInterrupt

    return on_round


def show_sweep(console: Console, sweep: Sweep) -> None:
    """A row per place."""
    table = Table(title="tau(n) = T(1) / T(n)", title_justify="left", box=None)
    names = ("sequences", "context", "T(1) ms", *(f"tau({n})" for n in sweep.widths[1:]), "experts")
    for name in names:
        table.add_column(name, justify="right")
    for n_sequences, n_context in sorted(sweep.profiles):
        profile = sweep.profiles[n_sequences, n_context]
        taus = (f"{profile.tau(n):.2f}" for n in sweep.widths[1:])
        times = f"{profile.verify[1].median_us / 1e3:.2f}"
        experts = "-".join(f"{profile.n_experts[n]:.0f}" for n in (1, sweep.widths[-1]) if profile.n_experts)
        table.add_row(str(n_sequences), str(n_context), times, *taus, experts)
    console.print(table)
    console.print(
        "n: tokens of each sequence in a pass, n - 1 of them drafted; T: of the whole\n"
        "batch; experts: distinct ones per layer, at the narrowest and the widest",
        style="dim",
    )


def _numbers(name: str, text: str, most: int) -> list[int]:
    """Comma-separated whole numbers, in order and once each. Raises ConfigError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise ConfigError(name, text, "whole numbers with commas between them, such as 1,2,4,8")
    for part in parts:
        check_int(name, int(part), 1, most)
    return sorted({int(part) for part in parts})
