"""What every part of the training shares: sizes of the run, its error, how a file is written."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch

EOS: Final = "<|endoftext|>"
SEED: Final = 20240607
N_CTX: Final = 1024  # tokens per training window, and the context both models are made for
ROWS_PER_STEP: Final = 8  # windows per optimiser step, shared among the workers


class UserError(Exception):
    """What the user gave cannot be used; the text says why and what to do."""


def save_atomically(data: object, path: Path) -> None:
    """`torch.save` that leaves either the old file or the new one, never half of one."""
    part = path.with_name(path.name + ".part")
    torch.save(data, part)
    part.replace(path)
