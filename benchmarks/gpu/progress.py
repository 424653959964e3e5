"""Time left, what was done and what was skipped: one object that all phases of a run report to."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Progress:
    """Counts down from `budget_s`; `notes` end up under the printed table."""

    budget_s: float
    start_s: float = field(default_factory=time.monotonic)
    done: list[tuple[str, float, str]] = field(default_factory=list)  # (phase, seconds, result)
    skipped: list[tuple[str, str]] = field(default_factory=list)  # (what, why)

    @property
    def left_s(self) -> float:
        return self.budget_s - (time.monotonic() - self.start_s)

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.start_s:6.1f} s] {text}", flush=True)

    def skip(self, what: str, why: str) -> None:
        self.skipped.append((what, why))
        self.say(f"skipped {what}: {why}")

    def finish(self, phase: str, seconds: float, result: str) -> None:
        self.done.append((phase, seconds, result))
        self.say(f"{phase}: {result} ({seconds:.1f} s)")

    def summary(self) -> list[str]:
        lines = [f"  {phase:8} {seconds:6.1f} s  {result}" for phase, seconds, result in self.done]
        lines += [f"  skipped  {what}: {why}" for what, why in self.skipped]
        return lines or ["  nothing was asked for"]
