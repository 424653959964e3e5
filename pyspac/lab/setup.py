"""What one run is asked for: policies by name, with their knobs, and the capacity."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pyspac.checks import check_int, check_range
from pyspac.engine.values import read_size
from pyspac.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Names of the four policies, each "NAME" or "NAME:KNOB=NUMBER,...", and the capacity."""

    eviction: str = "ema"
    prefetch: str = "auto"  # what suits the eviction: utility for the estimators, else none
    miss: str = "auto"  # host for the estimators and fixed allocations, else fetch
    routing: str = "standard"
    capacity: str = "5%"  # of all experts' bytes, or MiB
    without: frozenset[str] = frozenset()  # ablations of the shipping scheduler
    predict: tuple[str, ...] = ()  # of pyspac.scheduler.config.PREDICTORS, on what the trace recorded
    per_layer: bool = False  # each layer has slots of its own; else a layout group shares them
    is_cold: bool = False  # the scheduler does not hear of the prompt
    n_first: int | None = None  # tokens of `coverage_first`; None: it is not reported
    predictor_accuracy: float = 0.85  # of predictions that the trace does not record
    seed: int = 0
    label: str = ""  # of a named combination

    def __post_init__(self) -> None:
        """Raises ConfigError if the accuracy is no share, or n_first below 1."""
        check_range("--accuracy", self.predictor_accuracy, 0.0, 1.0)
        if self.n_first is not None:
            check_int("--first", self.n_first, 1)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for reports."""
        return {**asdict(self), "without": sorted(self.without)}


def capacity_bytes(text: str, total_bytes: int) -> int:
    """Bytes of all experts, at most all; ConfigError if it is no size."""
    size = read_size("--capacity", text, total_bytes)
    if size is None:
        raise ConfigError("--capacity", text, "a share of all experts such as 5%, or a number of MiB")
    return min(size, total_bytes)


def parse(text: str) -> tuple[str, dict[str, float]]:
    """Split "name:knob=1,other=2" into name and knobs; ConfigError if a value is no number."""
    name, _, rest = text.partition(":")
    try:
        pairs = (part.split("=", 1) for part in rest.split(",") if part)
        return name, {key: float(value) for key, value in pairs}
    except ValueError as error:
        raise ConfigError("the policy", text, "NAME or NAME:KNOB=NUMBER,...") from error
