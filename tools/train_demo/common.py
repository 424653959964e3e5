"""What every part of the training shares: sizes of the run, and its error."""

from __future__ import annotations

from typing import Final

EOS: Final = "<|endoftext|>"
SEED: Final = 20240607
N_CTX: Final = 1024  # tokens per training window, and the context both models are made for
ROWS_PER_STEP: Final = 8  # windows per optimiser step, shared among the workers


class UserError(Exception):
    """What the user gave cannot be used; the text says why and what to do."""
