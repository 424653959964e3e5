"""What `pyspac bench` found: a table, plain sentences, a row of JSON, a figure."""

from __future__ import annotations

import io
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from pyspac.commands.bench_ways import PROMPTS, Given, Way
from pyspac.commands.json_file import write_result
from pyspac.errors import PyspacError
from pyspac.talk.turns import Speeds, Spread, Turns

AUTO_SPLIT: Final = "--device auto --cache auto"  # what `pyspac run` does by itself
MIN_ROUNDS: Final = 5  # of a comparison whose winner is saved


@dataclass(frozen=True, slots=True)
class Findings:
    """Of one model on this machine; `given`: what the user gave."""

    given: Given
    ways: dict[str, Way]
    turns: Turns
    at_once: bool
    machine: dict[str, object]

    @property
    def winner(self) -> str:
        """The way to use: the faster of the rivals."""
        own, other, ratio = self.rivals(self.turns.generation())
        return own if ratio.median >= 1.0 else other

    def rivals(self, speeds: Speeds) -> tuple[str, str, Spread]:
        """pyspac's best way, llama.cpp's that comes closest to it or beats it, and the ratio of the two.

        Each pair is compared round by round, so what disturbs a whole round counts for nothing.
        """
        own = [name for name, way in self.ways.items() if way.is_own]
        others = [name for name in self.ways if name not in own]
        closest = {name: min(others, key=lambda other: speeds.ratio(name, other).median) for name in own}
        best = max(own, key=lambda name: speeds.ratio(name, closest[name]).median)
        return best, closest[best], speeds.ratio(best, closest[best])

    def verdict(self) -> str:
        """Who wins, in plain words: every round of one side has to be the faster."""
        own, other, ratio = self.rivals(self.turns.generation())
        if ratio.least > 1.0:
            text = f"pyspac wins: '{own}' generates {_times(ratio)} as fast as '{other}'."
        elif ratio.most < 1.0:
            text = (
                f"pyspac loses here: its best way, '{own}', generates {_times(ratio)} as fast as '{other}'. "
                "Take llama.cpp for this model, or its way in pyspac."
            )
        else:
            text = (
                f"Neither wins: '{own}' generates {_times(ratio)} as fast as '{other}', now faster, now "
                f"slower. '{self.winner}' has the better median."
            )
        way = self.ways[self.winner]
        return f"{text}\nUse: pyspac run -m {shlex.quote(str(self.given.model))} {way.flags}"

    def why_not_saved(self) -> str | None:
        """Why the winner does not become the model's defaults; None: it does.

        The rule: it was faster, in every one of MIN_ROUNDS rounds or more, than its rival and than what
        `pyspac run` does by itself, which is pyspac's first way.
        """
        speeds = self.turns.generation()
        plain = next(name for name, way in self.ways.items() if way.is_own)
        if (n_rounds := len(speeds.tps[plain])) < MIN_ROUNDS:
            return f"{n_rounds} rounds say too little, {MIN_ROUNDS} are needed"
        if self.winner == plain and not self._says_how:
            return f"'{plain}' is what pyspac run does by itself"
        own, other, _ = self.rivals(speeds)
        rival = other if self.winner == own else own
        for name in sorted({rival, plain} - {self.winner}):
            ratio = speeds.ratio(self.winner, name)
            if ratio.least <= 1.0:
                return f"'{self.winner}' is {_times(ratio)} as fast as '{name}', not faster in every round"
        return None

    @property
    def _says_how(self) -> bool:
        """Whether pyspac's first way has flags of the user's, so that plain `pyspac run` is another."""
        return bool(self.given.ram) or self.given.split != AUTO_SPLIT

    def prompt_verdict(self) -> str:
        """The same of prompts, which may have other rivals."""
        own, other, ratio = self.rivals(self.turns.prompts())
        return f"Prompts: '{own}' takes them {_times(ratio)} as fast as '{other}'."

    def row(self) -> dict[str, Any]:
        """The object of --json: no paths, so that it can be shared."""
        generation, prompts = self.turns.generation(), self.turns.prompts()
        own, other, ratio = self.rivals(generation)
        return {
            "model": self.given.model.name,
            "draft": next((way.options.draft.name for way in self.ways.values() if way.options.draft), None),
            "mtp": self.given.mtp.name if self.given.mtp else None,
            "ram": self.given.ram.removeprefix("--ram ") or None,
            "winner": self.winner,
            "rivals": [own, other],
            "ratio": asdict(ratio),
            "at_once": self.at_once,
            "ways": {
                name: {
                    "generation_tps": asdict(generation.of(name)),
                    "prompt_tps": asdict(prompts.of(name)),
                    "acceptance": self.turns.acceptance(name),
                    **{f"{kind}_tps": asdict(self.turns.generation(kind).of(name)) for kind in PROMPTS},
                }
                for name in self.ways
            },
            "machine": self.machine,
        }


def _times(ratio: Spread) -> str:
    return f"{ratio.median:.2f} times ({ratio.least:.2f} to {ratio.most:.2f} over the rounds)"


def show(console: Console, findings: Findings) -> None:
    """The table, and the sentences."""
    generation, prompts = findings.turns.generation(), findings.turns.prompts()
    table = Table("tokens/s", box=None, padding=(0, 1, 0, 0))
    for name in ("prompt", *PROMPTS, "all", "+-", "accepted"):
        table.add_column(name, justify="right")
    for name in findings.ways:
        kinds = [findings.turns.generation(kind).of(name).median for kind in PROMPTS]
        total = generation.of(name)
        style = "bold" if name == findings.winner else None
        cells = [prompts.of(name).median, *kinds, total.median, (total.high - total.low) / 2]
        share = findings.turns.acceptance(name)
        accepted = "" if share is None else f"{100 * share:.0f} %"
        table.add_row(name, *map(_number, cells), accepted, style=style)
    console.print(table)
    console.print(
        "prompt: processing prompts; the others: generation after each kind,\n"
        "and after all; medians of the rounds; +-: half the quartiles' distance of all;\n"
        "accepted: of what was drafted, which --speculation auto may have stopped.\n"
        "A way wins only if it is ahead in every round",
        style="dim",
    )
    if not findings.at_once:
        console.print(
            "They ran one after the other, as all at once would have taken each other's memory: a "
            "disturbance of the machine may have met only one of them.",
            style="yellow",
        )
    console.print(findings.verdict(), markup=False, soft_wrap=True)
    console.print(findings.prompt_verdict(), markup=False, soft_wrap=True)


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def draw(findings: Findings, path: Path) -> None:
    """Write the figure, whole or not at all: generation and prompts, a bar per way, with quartiles."""
    figure_of = _figure_class()
    figure = figure_of(figsize=(10, 1.2 + 0.45 * len(findings.ways)), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    figure.suptitle(f"{findings.given.model.name}: {findings.machine['cpu']}")
    _draw_bars(panels[0], findings, findings.turns.generation(), "generation, tokens per second")
    _draw_bars(panels[1], findings, findings.turns.prompts(), "prompts, tokens per second")
    panels[0].invert_yaxis()
    data = io.BytesIO()
    figure.savefig(data, dpi=110, format="png")
    write_result(path, data.getvalue(), "figure")


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PyspacError("a figure needs matplotlib; install it, or leave --png out") from error
    return Figure


def check_can_draw() -> None:
    """Before anything is measured. Raises PyspacError."""
    _figure_class()


def _draw_bars(axes: Any, findings: Findings, speeds: Speeds, label: str) -> None:
    names = list(findings.ways)
    spreads = [speeds.of(name) for name in names]
    errors = [[s.median - s.low for s in spreads], [s.high - s.median for s in spreads]]
    colours = ["#0b6e4f" if findings.ways[name].is_own else "#7a7a7a" for name in names]
    axes.barh(names, [s.median for s in spreads], xerr=errors, color=colours, capsize=3)
    axes.set_xlabel(label)
    axes.grid(axis="x", alpha=0.25)
