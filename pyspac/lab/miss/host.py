"""Host: compute missing experts on the host, while the device computes the others (Fiddler; pyspac's
engine). No knob.
"""

from __future__ import annotations

import numpy as np

from pyspac.lab.events import Access
from pyspac.lab.policy import HOST, Miss, MissPlan
from pyspac.lab.registry import register


@register("host")
class Host(Miss):
    """Copies nothing: only the prefetch policy brings experts to the device."""

    def leaves_to_host(self) -> bool:
        """All of them."""
        return True

    def handle(self, access: Access) -> MissPlan:
        """Leave all to the host."""
        return MissPlan(np.full(len(access.missing), HOST, np.int8))
