"""None: nothing is copied before it is asked for. No knob."""

from __future__ import annotations

from pyspac.lab.policy import Prefetch, register


@register("prefetch", "none")
class NoPrefetch(Prefetch):
    """Copies on demand alone."""
