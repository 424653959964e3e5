"""What one run is asked for: policies by name, with their knobs, and the capacity."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any, Final

from pyspac.checks import check_int, check_range
from pyspac.errors import ConfigError, UsageError
from pyspac.lab.trace import EARLY_MAX
from pyspac.units import MIB

PREDICTORS: Final = {  # name: its knobs
    "token": (),
    "next-layer": ("depth",),
    "draft-gate": (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Names of the four policies, each "NAME" or "NAME:KNOB=NUMBER,...", and the capacity."""

    eviction: str = "ema"
    prefetch: str = "auto"  # what suits the eviction: utility for the estimators, else none
    miss: str = "auto"  # host for the estimators and fixed allocations, else fetch
    routing: str = "standard"
    capacity: str = "5%"  # of all experts' bytes, or MiB
    without: frozenset[str] = frozenset()  # ablations of the shipping scheduler
    predict: tuple[str, ...] = ()  # of PREDICTORS, on what the trace recorded
    is_cold: bool = False  # the scheduler does not hear of the prompt
    n_first: int | None = None  # tokens of `coverage_first`; None: it is not reported
    predictor_accuracy: float = 0.85  # of predictions that the trace does not record
    seed: int = 0
    label: str = ""  # of a named combination

    def __post_init__(self) -> None:
        """Raises ConfigError if the accuracy is no share, n_first below 1, or a predictor unknown."""
        check_range("--accuracy", self.predictor_accuracy, 0.0, 1.0)
        if self.n_first is not None:
            check_int("--first", self.n_first, 1)
        for text in self.predict:
            check_predictor(text)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for reports."""
        return {**asdict(self), "without": sorted(self.without)}


def parse_predictors(text: str) -> tuple[str, ...]:
    """Read "token,next-layer:depth=2", or "none"; ConfigError names what is unknown."""
    found = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if "none" in found and len(found) > 1:
        raise ConfigError("--predict", text, "none alone, or the others without it")
    found = tuple(part for part in found if part != "none")
    for part in found:
        check_predictor(part)
    return found


def check_predictor(text: str) -> None:
    """Raise ConfigError for an unknown predictor, UsageError for an unknown knob."""
    name, knobs = parse(text)
    if name not in PREDICTORS:
        raise ConfigError("--predict", name, f"one or more of {', '.join(PREDICTORS)}, or none")
    for knob, value in knobs.items():
        if knob not in PREDICTORS[name]:
            instead = (
                f"give {', '.join(PREDICTORS[name])}" if PREDICTORS[name] else "leave it out, it has none"
            )
            raise UsageError(f"{name} has no knob {knob!r} (given: {value:g}): {instead}")
    if "depth" in knobs and knobs["depth"] not in range(1, EARLY_MAX + 1):
        raise ConfigError(f"--predict {name}:depth", knobs["depth"], f"a whole number from 1 to {EARLY_MAX}")


def capacity_bytes(text: str, total_bytes: int) -> int:
    """Read "5%" or a number of MiB; ConfigError if it is neither.

    The rule of spac_read_cache_size, written again as the lab runs without libspac; tests compare the two.
    """
    is_share = text.endswith("%")
    value = float(text.removesuffix("%")) if re.fullmatch(r"[0-9]+(\.[0-9]+)?%?", text) else -1.0
    if not 0.0 <= value <= (100.0 if is_share else 1e9):
        raise ConfigError("--capacity", text, "a share of all experts such as 5%, or a number of MiB")
    return min(int(value / 100 * total_bytes + 0.5) if is_share else int(value * MIB), total_bytes)


def parse(text: str) -> tuple[str, dict[str, float]]:
    """Split "name:knob=1,other=2" into name and knobs; ConfigError if a value is no number."""
    name, _, rest = text.partition(":")
    try:
        pairs = (part.split("=", 1) for part in rest.split(",") if part)
        return name, {key: float(value) for key, value in pairs}
    except ValueError as error:
        raise ConfigError("the policy", text, "NAME or NAME:KNOB=NUMBER,...") from error
