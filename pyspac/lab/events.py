"""What happens in a run, as policies are told it. An event holds what has happened, nothing that will.

StepBegun -> for each layer: Routed, Access -> for each copy: Loaded, Evicted -> StepOver
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pyspac.lab.demand import Bools, Demand, Floats, Indices, Tokens
from pyspac.lab.trace import softmax


@dataclass(frozen=True, slots=True)
class StepBegun:
    """A step begins: drafting, if any, is done now."""

    step: int  # counted from 0
    tokens: Tokens  # [n_token] the last token of the text, then the drafts
    n_draft: int


@dataclass(frozen=True, slots=True)
class RouterOutput:
    """One layer's router as it was recorded, token by token; only of tokens that ran the layer."""

    experts: npt.NDArray[np.int16]  # [n_token, n_expert_used], best first
    weights: npt.NDArray[np.float32]  # the same shape
    logits: npt.NDArray[np.float16]  # [n_token, n_expert]

    def probabilities(self) -> Floats:
        """Return [n_token, n_expert] the softmax of the logits."""
        return softmax(self.logits)


@dataclass(frozen=True, slots=True)
class Routed:
    """A layer's router has run; nothing was looked up yet."""

    demand: Demand  # by the router's own choice
    router: RouterOutput | None  # where the trace holds logits


@dataclass(frozen=True, slots=True)
class Access:
    """A layer asks for its experts, and it is known which of them are on the device."""

    step: int
    tokens: Tokens  # [n_token] of the step
    demand: Demand  # of n experts
    is_hit: Bools  # [n] computed on the device
    missing: Indices  # indices of the others in `demand`
    router: RouterOutput | None  # where the trace holds logits


@dataclass(frozen=True, slots=True)
class Loaded:
    """A copy into a slot has completed."""

    step: int
    key: int
    share: float = 1.0  # of its bytes that were copied: below 1 is low precision


@dataclass(frozen=True, slots=True)
class Evicted:
    """An expert has left its slot."""

    step: int
    key: int


@dataclass(slots=True)
class LayerTimes:
    """What the balancer learns from, predicted: one layer's experts by where they ran, and its times."""

    n_device: int = 0
    n_host: int = 0
    device_rows: int = 0
    host_rows: int = 0
    host_us: float = 0.0
    layer_us: float = 0.0


@dataclass(slots=True)
class StepTimes:
    """The same for a step."""

    draft_us: float = 0.0
    verify_us: float = 0.0
    layers: dict[int, LayerTimes] = field(default_factory=dict)  # by il


@dataclass(frozen=True, slots=True)
class StepOver:
    """All layers of a step have run."""

    step: int
    n_tokens: int
    n_draft: int
    n_emitted: int  # tokens of output that the step yields
    demands: Sequence[Demand]  # of its layers, as they were served
    times: StepTimes
