"""Controllers by name: those of `--speculation`, `per-k-ema`, and cascade less some of its parts."""

from __future__ import annotations

from functools import partial

from pyspac.errors import ConfigError
from pyspac.lab.drafts.per_k_ema import PerKEma
from pyspac.speculation.cascade import OPTIMISATIONS, Cascade, CascadeConfig
from pyspac.speculation.manager import MakeController, parse_controller


def parse_lab_controller(text: str) -> MakeController:
    """As `parse_controller`, and "per-k-ema" or "cascade-backoff-climb". Raises ConfigError."""
    base, *without = text.split("-")
    if base == "cascade" and without:
        if set(without) <= OPTIMISATIONS.keys():
            return partial(Cascade, config=CascadeConfig(without=frozenset(without)))
        raise ConfigError("--controllers", text, f"cascade-{'-'.join(OPTIMISATIONS)}, less parts")
    return PerKEma if text == PerKEma.name else parse_controller(text)
