"""What a soak has seen: memory over time and counts in, a verdict, a table and a JSON object out."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from statistics import linear_regression
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from tools.soak.faults.dealer import FaultCount
from tools.soak.tally import Tally

MIB: Final = 1 << 20
ALL_APPLIED_S: Final = 300.0  # by then each kind of fault has come several times, or something is wrong
MIN_JUDGED_S: Final = 600.0  # heaps settle within minutes; a shorter time says nothing about growth
WINDOW: Final = 0.25  # share of the samples at either end that count
FLOOR: Final = 10  # of a hundred parts of them: memory between faults, some of which hold 10 MiB for a minute


@dataclass(frozen=True, slots=True)
class Memory:
    """The server's resident memory over the time in which it was measured."""

    start_mib: float
    end_mib: float
    mib_per_hour: float  # of a line through all samples
    seconds: float

    @property
    def growth_percent(self) -> float:
        return 100 * (self.end_mib / self.start_mib - 1)

    @property
    def is_judged(self) -> bool:
        return self.seconds >= MIN_JUDGED_S

    def __str__(self) -> str:
        text = (
            f"{self.start_mib:.1f} MiB at the start, {self.end_mib:.1f} MiB at the end "
            f"({self.growth_percent:+.2f} %, {self.mib_per_hour:+.2f} MiB per hour over {self.seconds:.0f} s)"
        )
        return text if self.is_judged else f"{text}; too short to be judged"


def summarise_memory(samples: list[tuple[float, int]]) -> Memory | None:
    """Of [(seconds, bytes)], in order of time; None: fewer than two."""
    if len(samples) < 2:
        return None
    n = max(1, round(WINDOW * len(samples)))
    seconds, mib = [s for s, _ in samples], [n_bytes / MIB for _, n_bytes in samples]
    slope = linear_regression(seconds, mib).slope
    return Memory(_floor(mib[:n]), _floor(mib[-n:]), 3600 * slope, seconds[-1] - seconds[0])


def _floor(mib: list[float]) -> float:
    return sorted(mib)[len(mib) // FLOOR]


@dataclass(slots=True)
class Report:
    """Everything that is said at the end."""

    seed: int
    max_growth_percent: float
    tally: Tally
    faults: dict[str, FaultCount]
    fault_failures: list[str]
    seconds: float = 0.0
    n_questions: int = 0
    n_scheduler_restarts: int = 0
    memory: Memory | None = None
    troubles: list[str] = field(default_factory=list)  # what else was not as it should be

    def why_failed(self) -> list[str]:
        """One line per reason; none: passed."""
        tally, found = self.tally, list(self.troubles)
        if tally.n_lost:
            found.append(f"{tally.n_lost} answers lost")
        if tally.n_different:
            found.append(f"{tally.n_different} answers different")
        if not tally.is_balanced:
            found.append("answers asked for and answers booked do not agree")
        if not tally.n_complete:
            found.append("no answer was complete")
        if self.fault_failures:
            found.append(f"{len(self.fault_failures)} faults were not stood as they should be")
        idle = [name for name, fault in self.faults.items() if not fault.n_applied and not fault.skipped]
        if idle and self.seconds >= ALL_APPLIED_S:
            found.append(f"never applied in {self.seconds:.0f} s: {', '.join(idle)}")
        if self.memory and self.memory.is_judged and self.memory.growth_percent > self.max_growth_percent:
            found.append(
                f"memory grew by {self.memory.growth_percent:.2f} %, more than {self.max_growth_percent} %"
            )
        return found

    def to_dict(self) -> dict[str, Any]:
        """The object of --json."""
        tally = self.tally
        return {
            "passed": not self.why_failed(),
            "why_failed": self.why_failed(),
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "questions": self.n_questions,
            "answers": {
                "asked": tally.n_asked, "complete": tally.n_complete, "cut_on_purpose": tally.n_cut,
                "lost": tally.n_lost, "different": tally.n_different, "tokens": tally.n_tokens,
            },
            "faults": {name: asdict(count) for name, count in self.faults.items()},
            "fault_failures": self.fault_failures,
            "examples": tally.examples,
            "scheduler_restarts": self.n_scheduler_restarts,
            "memory": None if self.memory is None else asdict(self.memory),
        }  # fmt: skip

    def print(self, console: Console) -> None:
        """Tables and the verdict."""
        console.print(_fault_table(self.faults))
        tally = self.tally
        console.print(
            f"answers: {tally.n_asked} asked, {tally.n_complete} complete and right, {tally.n_cut} cut off "
            f"on purpose, {tally.n_lost} lost, {tally.n_different} different; {tally.n_tokens} tokens"
        )
        console.print(
            f"{self.seconds:.0f} s, {self.n_questions} questions, seed {self.seed}; the scheduler was "
            f"started again {self.n_scheduler_restarts} times"
        )
        console.print(f"server's memory: {self.memory or 'not measured'}")
        for text in (*self.fault_failures, *tally.examples):
            console.print(f"  {text}", markup=False)
        reasons = self.why_failed()
        console.print(f"FAILED: {'; '.join(reasons)}" if reasons else "passed", markup=False)


def _fault_table(faults: dict[str, FaultCount]) -> Table:
    table = Table("fault", box=None, pad_edge=False)
    for title in ("applied", "nothing to do", "failed"):
        table.add_column(title, justify="right")
    table.add_column("")
    for name, count in faults.items():
        numbers = (count.n_applied, count.n_idle, count.n_failed)
        table.add_row(name, *map(str, numbers), f"SKIPPED: {count.skipped}" if count.skipped else "")
    return table
