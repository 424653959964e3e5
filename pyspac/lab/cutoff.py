"""SP-MoE's cutoff layer: how many layers to prefetch for while the draft model runs (section 3.2).

Our reading: the largest number of layers L whose experts fit the device's room, and whose copies all end
before drafting does. The guess for layer l (1 .. L) is ready after l layers of the draft, so for every l

    l * layer_us + (n_l + ... + n_L) * copy_us <= n_draft * n_layer_draft * layer_us

n_l: experts to copy in layer l; layer_us: one layer of the draft; copy_us: one expert over the link.
"""

from __future__ import annotations

from collections.abc import Sequence


def cutoff_layer(
    n_by_layer: Sequence[float],
    *,
    layer_us: float,
    copy_us: float,
    n_draft: int,
    n_layer_draft: int,
    n_experts_room: float,
) -> int:
    """Return L, the number of layers to prefetch for; 0: none. O(n_layer^2)."""
    end_us = n_draft * n_layer_draft * layer_us
    for n_layers in range(len(n_by_layer), 0, -1):
        if sum(n_by_layer[:n_layers]) <= n_experts_room and _ends_in_time(
            n_by_layer[:n_layers], layer_us, copy_us, end_us
        ):
            return n_layers
    return 0


def _ends_in_time(n_by_layer: Sequence[float], layer_us: float, copy_us: float, end_us: float) -> bool:
    n_left = 0.0
    for il in range(len(n_by_layer), 0, -1):
        n_left += n_by_layer[il - 1]
        if il * layer_us + n_left * copy_us > end_us:
            return False
    return True
