"""None: nothing is copied before it is asked for. No knob."""

from __future__ import annotations

from pyspac.lab.policy import Prefetch
from pyspac.lab.registry import register


@register("none")
class NoPrefetch(Prefetch):
    """Only copies on demand."""
