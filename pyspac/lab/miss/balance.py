"""Balance: split the misses between link and host so that both end together (HybriMoE; FreeToken's q*).

The busiest misses are fetched, the others computed on the host; the number that ends soonest is found by
trying all, with the machine's own times. No knob.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pyspac.lab.policy import FETCH, HOST, Demand, Miss, MissPlan, register


@register("miss", "balance")
class Balance(Miss):
    """Minimises the longer of the two sides."""

    def handle(self, demand: Demand, missing: npt.NDArray[np.intp]) -> MissPlan:
        """Try every split; O(misses)."""
        machine, size = self.run.machine, float(self.run.geometry.expert_bytes[demand.il])
        order = np.argsort(-demand.rows[missing], kind="stable")
        rows = demand.rows[missing][order]
        rows_left = rows[::-1].cumsum()[::-1]  # from the i-th on
        n = len(missing)
        wait = max(self.run.link.free_at - self.run.now, 0.0) if self.run.link.in_flight >= 0 else 0.0
        best, best_us = 0, float("inf")
        for n_fetch in range(n + 1):
            link_us = wait + n_fetch * machine.copy_us(size) if n_fetch else 0.0
            n_host = n - n_fetch
            host_us = (
                machine.host_us(n_host * size, size * float(rows_left[n_fetch]), link_us) if n_host else 0.0
            )
            if max(link_us, host_us) < best_us:
                best, best_us = n_fetch, max(link_us, host_us)
        fate = np.full(n, HOST, np.int8)
        fate[order[:best]] = FETCH
        return MissPlan(fate)
