"""How many tokens of a prompt are computed at once (llama-server's -ub), unless the user says.

In: a model's header, where its experts are, free memory. Out: tokens. A piece reads, or copies to the
device, all experts that its tokens chose, so few pieces pay where that takes the time. Where the host
computes experts that are in memory, few tokens per expert are enough for most kernels, and a long piece
computes more that the attention's mask hides.
"""

from __future__ import annotations

from typing import Final, Literal

from pyspac.model.device_needs import N_UBATCH, compute_bytes
from pyspac.model.geometry import MoeGeometry
from pyspac.model.gguf_header import GgufHeader

# of the experts: the host's memory, the disk, or a device and what does not fit there on the host
Place = Literal["host", "disk", "device"]
LONGEST_PIECE: Final = 2048  # llama-server's -b: answers under way wait for so many, whatever -ub is
DEVICE_SHARE: Final = 0.9  # a model that takes less of a device has its experts there: prompts copy none
BUFFERS_SHARE: Final = 16  # of free memory: as much of it as a longer piece's buffers may take


def wanted_piece(geometry: MoeGeometry, place: Place, per_expert: int = 0) -> int:
    """Tokens, if memory is no matter; `per_expert`: how many the host's kernels want for each expert."""
    if not geometry.is_moe:
        return N_UBATCH
    if place != "host":
        return LONGEST_PIECE
    return host_piece(geometry.n_expert, geometry.n_expert_used, per_expert)


def host_piece(n_expert: int, n_expert_used: int, per_expert: int) -> int:
    """Of experts in memory that the host computes."""
    return min(LONGEST_PIECE, max(N_UBATCH, per_expert * n_expert // max(1, n_expert_used)))


def beside_device(geometry: MoeGeometry, device_bytes: int) -> Place:
    """Where experts are, with so much memory on a device: "host" where prompts have nothing to copy."""
    return "host" if geometry.model_bytes < DEVICE_SHARE * device_bytes else "device"


def fit_piece(wanted: int, header: GgufHeader, n_ctx: int, free_bytes: int) -> int:
    """So many tokens, or 512 times a power of two of them: within the context, and a share of free memory."""
    n = min(wanted, N_UBATCH)
    while 2 * n <= min(wanted, n_ctx) and compute_bytes(header, n_ctx, 2 * n) <= free_bytes // BUFFERS_SHARE:
        n *= 2
    return n
