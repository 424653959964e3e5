"""Settings of the scheduler: frozen, checked when made, with units in their names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pyspac.checks import check_int, check_range
from pyspac.engine.ahead import DRAFT_GATE, NEXT_LAYERS
from pyspac.errors import ConfigError, UsageError

# the estimators, with levels that suit each: 4 is the paper's K; the others want a finer order for eviction
DEFAULT_N_LEVELS = {"ema": 16, "spac": 4, "lru": 255, "lfu": 16, "last": 16, "static": 16}
ESTIMATORS = tuple(DEFAULT_N_LEVELS)

# the ablations of MoE-SpAc 4.4, and some of ours: what is taken away, as `pyspac lab run --help` says it
ABLATIONS = {
    "specue": "binary utility (n_levels = 1)",
    "adabc": "fixed boundaries, up = 3 and down = 1 (estimator spac)",
    "hetwb": "fixed threshold, tau = 2",
    "prefetch": "fill the pool once",
    "evict": "a resident expert never leaves",
    "prompt": "ignore prompt activations; fill free slots only from the plan (not in the paper)",
    "stage": "prompts do not pass through the device's slots (not in the paper)",
    "sd": "plain decoding, no drafts",  # for the start of a server; the scheduler only records it
}
# what else can be taken away, and is no part of how experts are chosen
FALLBACK = "fallback"
WHOLE = "whole"
PARTS = {
    **ABLATIONS,
    FALLBACK: "copy without measuring whether it pays (not in the paper)",
    WHOLE: "split all layers, hold none whole (not in the paper)",
}

# who says what comes next: in pyspac/scheduler/predict/, and in the engine
TOKEN = "token"
PREDICTORS = (TOKEN, *NEXT_LAYERS, DRAFT_GATE)
NO_PREDICTOR = "none"

# evictions that go by the utility of the estimator with their name
BY_UTILITY = ("ema", "spac", "last")

DECAY = 0.95  # per step or fit: what is left of the past in measured times

# [gamma] of Algorithm 1 without drafts, for which MoE-SpAc has no rule: its own draft length (4.1)
GAMMA_WITHOUT_DRAFTS = 8
# boundaries start at floor(gamma / 2); at 0 they would stay there, and lift the unused experts
MIN_GAMMA = 2


DRAFT_MAX = 255  # tokens of the longest draft that makes sense
# speeds of a link that are believed, in 1e9 bytes/s
LINK_GB_S = (1e-3, 1e5)


def parse_ablations(names: str | Iterable[str]) -> frozenset[str]:
    """Read ablations from "a,b" or from several names; ConfigError names the unknown ones."""
    parts = names.split(",") if isinstance(names, str) else list(names)
    found = frozenset(part.strip() for part in parts if part.strip())
    unknown = sorted(found - PARTS.keys())
    if unknown:
        raise ConfigError("without", ", ".join(unknown), f"one or more of {', '.join(PARTS)}")
    return found


def parse_predictors(names: str | Iterable[str], given_as: str = "predict") -> tuple[str, ...]:
    """Read predictors from "a,b" or several names, "none" for none; ConfigError names the unknown ones."""
    parts = names.split(",") if isinstance(names, str) else list(names)
    found = tuple(dict.fromkeys(part.strip() for part in parts if part.strip()))
    unknown = [name for name in found if name not in PREDICTORS and name != NO_PREDICTOR]
    if unknown:
        wanted = f"one or more of {', '.join(PREDICTORS)}, or {NO_PREDICTOR}"
        if unknown[0].lstrip("-").isdecimal():
            wanted += " (a number of tokens is given with -n)"
        raise ConfigError(given_as, ", ".join(unknown), wanted)
    if NO_PREDICTOR in found and len(found) > 1:
        raise ConfigError(given_as, ", ".join(found), f"only {NO_PREDICTOR}, or the others without it")
    return tuple(name for name in found if name != NO_PREDICTOR)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How utilities, thresholds and loads are decided. Symbols of MoE-SpAc in brackets."""

    estimator: str = "ema"  # one of ESTIMATORS
    n_levels: int | None = None  # [K] utilities are 0 .. n_levels; None: what suits the estimator
    forgetting: float = 0.1  # [lambda] of spac's boundaries
    n_draft_max: int = 8  # longest draft; see `gamma`
    ema_decay: float = 0.97  # of ema, per token: share of the past that is left after one more token
    static_steps: int = 8  # of static: steps to learn from before it freezes
    threshold: int | Literal["auto"] = "auto"  # [tau] fixed, or balanced per layer and step
    # steps within which a swap must save its bytes; 0: any better one may; None: as many as ema remembers
    # tokens, and 0 for the others
    payback_steps: float | None = None
    budget_share: float = 0.5  # of the link's time that copies may fill; hosts share their memory with it
    byte_budget: int | Literal["auto"] | None = "auto"  # bytes per forward; None: no limit
    link_gb_s: float | None = None  # known speed of the link in 1e9 bytes/s, until copies were measured
    without: frozenset[str] = frozenset()  # see PARTS
    predict: tuple[str, ...] = ()  # of PREDICTORS
    # "lru+fetch": the engine says who leaves, and copies what a layer does not find; None: as decided here
    baseline: str | None = None

    def __post_init__(self) -> None:
        """Check every field; ConfigError names field, value and what is allowed."""
        if self.estimator not in ESTIMATORS:
            raise ConfigError("estimator", self.estimator, f"one of {', '.join(ESTIMATORS)}")
        if self.n_levels is not None:
            check_int("n_levels", self.n_levels, 1, 255)
        check_range("forgetting", self.forgetting, 0.0, 1.0)
        check_int("n_draft_max", self.n_draft_max, 0, DRAFT_MAX)
        check_range("ema_decay", self.ema_decay, 0.0, 0.9999)
        check_int("static_steps", self.static_steps, 1, 1_000_000)
        if self.payback_steps is not None:
            check_range("payback_steps", self.payback_steps, 0.0, 1e6)
        check_range("budget_share", self.budget_share, 0.01, 1.0)
        if self.threshold != "auto":
            check_int("threshold", self.threshold, 1, 255)
        if self.byte_budget is not None and self.byte_budget != "auto":
            check_int("byte_budget", self.byte_budget, 0, 2**63 - 1)
        if self.link_gb_s is not None:
            check_range("link_gb_s", self.link_gb_s, *LINK_GB_S)
        object.__setattr__(self, "without", parse_ablations(self.without))
        object.__setattr__(self, "predict", parse_predictors(self.predict))
        if self.predict and "prefetch" in self.without:
            raise UsageError(
                f"predict {', '.join(self.predict)} has no effect without prefetch, as then nothing is "
                "copied after the first step: leave out one of the two"
            )
        if self.predict and not self.is_scheduled:
            raise UsageError(
                f"predict {', '.join(self.predict)} has no effect with {self.baseline}, which copies what a "
                "layer asks for: leave out one of the two"
            )

    @property
    def policy(self) -> str:
        """Return its name, for reports."""
        return self.baseline or self.estimator

    @property
    def is_scheduled(self) -> bool:
        """Return whether the engine obeys what is decided here."""
        return self.baseline is None or self.baseline.partition("+")[0] in BY_UTILITY

    @property
    def effective_levels(self) -> int:
        """Return n_levels [K] after defaults and the ablation `specue`."""
        if "specue" in self.without:
            return 1
        return self.n_levels if self.n_levels is not None else DEFAULT_N_LEVELS[self.estimator]

    @property
    def gamma(self) -> int:
        """Return the draft length of Algorithm 1, never one at which its boundaries are 0."""
        return max(self.n_draft_max, MIN_GAMMA) if self.n_draft_max > 0 else GAMMA_WITHOUT_DRAFTS

    @property
    def effective_payback_steps(self) -> float:
        """Return payback_steps after defaults; 0: no such condition."""
        if self.payback_steps is not None:
            return self.payback_steps
        return self.memory_tokens if self.estimator == "ema" else 0.0

    @property
    def has_fallback(self) -> bool:
        """Return whether copies may be left out where they do not pay: no way to copy was asked for."""
        is_asked = bool(self.without - {"sd", WHOLE}) or bool(self.predict) or self.threshold != "auto"
        is_asked |= self.baseline is not None
        return not is_asked and self.byte_budget == "auto"

    @property
    def has_whole_layers(self) -> bool:
        """Return whether the device may hold layers whole: no other way to fill it was asked for.

        The other estimators are there to be compared, each with the rules of its authors.
        """
        is_asked = bool(self.without - {"sd", FALLBACK, "prompt", "stage"}) or self.threshold != "auto"
        is_asked |= self.baseline is not None
        return not is_asked and self.byte_budget != 0 and self.estimator == "ema"

    @property
    def memory_tokens(self) -> float:
        """Return how many tokens ema remembers: the sum of all their weights, where the last one weighs 1."""
        return 1.0 / (1.0 - self.ema_decay)

    @property
    def fixed_threshold(self) -> int | None:
        """Return the fixed tau, within 1 .. effective_levels, or None if it is balanced."""
        if "hetwb" in self.without:
            return min(2, self.effective_levels)
        if self.threshold == "auto":
            return None
        return min(self.threshold, self.effective_levels)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for results files; `without` as a sorted list."""
        return {**asdict(self), "without": sorted(self.without)}
