"""Balance: split the misses between link and host so that both end together (HybriMoE; FreeToken's q*).

The busiest misses are fetched, the others computed on the host; the number that ends soonest is found by
trying all, with the machine's own times. No knob.
"""

from __future__ import annotations

import numpy as np

from pyspac.lab.events import Access
from pyspac.lab.policy import FETCH, HOST, Miss, MissPlan
from pyspac.lab.registry import register


@register("balance")
class Balance(Miss):
    """Minimises the longer of the two sides."""

    def handle(self, access: Access) -> MissPlan:
        """Try every split; O(misses)."""
        machine, demand = self.view.machine, access.demand
        size = float(self.view.geometry.expert_bytes[demand.il])
        order = np.argsort(-demand.rows[access.missing], kind="stable")
        rows = demand.rows[access.missing][order]
        rows_left = rows[::-1].cumsum()[::-1]  # from the i-th on
        n, wait_us = len(order), self.view.link.free_in_us
        best, best_us = 0, float("inf")
        for n_fetch in range(n + 1):
            link_us = wait_us + n_fetch * machine.copy_us(size) if n_fetch else 0.0
            n_host = n - n_fetch
            host_us = (
                machine.host_us(n_host * size, size * float(rows_left[n_fetch]), link_us) if n_host else 0.0
            )
            if max(link_us, host_us) < best_us:
                best, best_us = n_fetch, max(link_us, host_us)
        fate = np.full(n, HOST, np.int8)
        fate[order[:best]] = FETCH
        return MissPlan(fate)
