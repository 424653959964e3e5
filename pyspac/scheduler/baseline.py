"""EVICTION+MISS by the lab's names (`lru+fetch`): policies to compare with, on a running model.

In: the text. Out: the settings of `SchedulerConfig` that stand for it. The engine carries them out, and knows
the names (engine/src/cache/eviction.cpp).
"""

from __future__ import annotations

import re
from typing import Any, Final

from pyspac.engine.values import check_variable
from pyspac.errors import UsageError
from pyspac.scheduler.config import BY_UTILITY, ESTIMATORS, SchedulerConfig

KEY: Final = "baseline"
VARIABLE: Final = "PYSPAC_BASELINE"
HOST, FETCH = "host", "fetch"  # misses: the host computes them; they are copied at once
_FORM: Final = re.compile(r"[a-z-]+(:cyclic=[0-9]+)?(?P<miss>\+.*)?", re.DOTALL)


def names_baseline(text: str) -> bool:
    """Whether it is meant as EVICTION+MISS, or is an EVICTION."""
    form = _FORM.fullmatch(text)
    return form is not None and (form["miss"] is not None or _is_eviction(text))


def baseline_settings(name: str, text: str) -> dict[str, Any]:
    """Fields of SchedulerConfig; without a MISS what suits the eviction in the lab: `fetch`.

    `name`: the option, for errors. Raises UsageError.
    """
    eviction, _, miss = text.partition("+")
    if miss == HOST and eviction in BY_UTILITY:
        return {"estimator": eviction}
    if miss == HOST and _is_eviction(eviction):
        instead = f", or {eviction} for the estimator" if eviction in ESTIMATORS else ""
        raise UsageError(
            f"{name} {text} copies nothing, so that {eviction} has no expert to evict: give "
            f"{eviction}+{FETCH}{instead}"
        )
    found = text if "+" in text else f"{text}+{FETCH}"
    check_variable(VARIABLE, found, name)
    return {KEY: found} | ({"estimator": eviction} if eviction in BY_UTILITY else {})


def with_baseline(name: str, values: dict[str, Any]) -> dict[str, Any]:
    """The same settings, with what their `baseline` stands for. Raises UsageError."""
    if KEY not in values:
        return values
    text, others = str(values[KEY]), {key: value for key, value in values.items() if key != KEY}
    found = baseline_settings(name, text)
    if "estimator" not in found and others:
        raise UsageError(f"{name}: {', '.join(others)} has no effect with {KEY} {text}: leave it out")
    if "estimator" in others and others["estimator"] != found["estimator"]:
        raise UsageError(f"{name}: estimator and {KEY} name two orders of eviction: leave out the estimator")
    return others | found


def check_baseline(name: str, config: SchedulerConfig, *, stock: bool, ram_bytes: int | None) -> None:
    """Raise UsageError where nothing can be copied at the moment when a layer asks for it."""
    if config.baseline is None:
        return
    if stock:
        raise UsageError(f"{name} {config.baseline} has no effect with --stock, without copies: omit one")
    if ram_bytes is not None:
        raise UsageError(f"{name} {config.baseline} needs all experts in memory: leave out --ram")


def _is_eviction(text: str) -> bool:
    try:
        check_variable(VARIABLE, f"{text}+{FETCH}")
    except UsageError:
        return False
    return True
