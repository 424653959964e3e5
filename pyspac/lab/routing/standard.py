"""Standard: the router's own choice. No knob."""

from __future__ import annotations

from pyspac.lab.policy import Routing
from pyspac.lab.registry import register


@register("standard")
class Standard(Routing):
    """Changes nothing."""
