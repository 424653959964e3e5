"""LFU: the expert used in the fewest steps leaves, ties by oldest use (SpecMD, Appendix B).

Knob: `keep`, what is left of a count after each step; 1: counts never fade.
"""

from __future__ import annotations

from typing import ClassVar

from pyspac.lab.events import Access, StepOver
from pyspac.lab.policy import Eviction
from pyspac.lab.registry import register


@register("lfu")
class Lfu(Eviction):
    """Worth is the count of uses over the whole history; the fraction orders equals by last use."""

    knobs: ClassVar[dict[str, float]] = {"keep": 1.0}
    limits: ClassVar[dict[str, tuple[float, float]]] = {"keep": (0, 1)}

    def start(self) -> None:
        """Count nothing yet."""
        super().start()
        self.count = self.worth.copy()

    def on_access(self, access: Access) -> None:
        """Count one use per expert and step."""
        keys = access.demand.keys
        self.count[keys] += 1.0
        now = access.step * self.view.n_layer + access.demand.il
        self.worth[keys] = self.count[keys] + now * 1e-9

    def on_step_over(self, event: StepOver) -> None:
        """Let all counts fade."""
        if self.knob["keep"] != 1.0:
            self.count *= self.knob["keep"]
            self.worth *= self.knob["keep"]
