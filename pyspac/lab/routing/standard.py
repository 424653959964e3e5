"""Standard: the router's own choice. No knob."""

from __future__ import annotations

from pyspac.lab.policy import Routing, register


@register("routing", "standard")
class Standard(Routing):
    """Changes nothing."""
