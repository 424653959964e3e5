"""Fading count: the expert with the fewest uses leaves; old uses count less. Knob: `keep` per step."""

from typing import ClassVar

from pyspac.lab.events import Access, StepOver
from pyspac.lab.policy import Eviction
from pyspac.lab.registry import register


@register("fading-count")
class FadingCount(Eviction):
    """The base class evicts the least `worth` [n_layer * n_expert]."""

    knobs: ClassVar = {"keep": 0.9}

    def on_access(self, access: Access) -> None:
        """Count a layer's activations."""
        self.worth[access.demand.keys] += access.demand.rows

    def on_step_over(self, event: StepOver) -> None:
        """Let all counts fade."""
        self.worth *= self.knob["keep"]
