"""Checks of settings, shared by the frozen classes that hold them."""

from __future__ import annotations

from typing import Any

from pyspac.errors import ConfigError


def check_range(field: str, value: float, low: float, high: float) -> None:
    """Raise ConfigError unless `value` is a number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ConfigError(field, value, f"a number from {low:g} to {high:g}")


def check_int(field: str, value: Any, low: int, high: int | None = None) -> None:
    """Raise ConfigError unless `value` is a whole number from `low` to `high` (None: no bound)."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or value < low or (high is not None and value > high):
        wanted = f"of {low} or more" if high is None else f"from {low} to {high}"
        raise ConfigError(field, value, f"a whole number {wanted}")
