"""What the user lets the engine leave out: `--lossy KIND:STRENGTH`, read and checked (SpecMD, 3.1.2)."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pyspac.checks import check_range
from pyspac.engine.values import check_variable
from pyspac.errors import UsageError
from pyspac.model.checks import check_model_file

FLAG: Final = "--lossy"
VARIABLE: Final = "PYSPAC_LOSSY"
MAX_KL: Final = "--max-kl"
MAX_KL_VARIABLE: Final = "PYSPAC_MAX_KL"


def copies_of(text: str | None) -> list[Path]:
    """Files of lowbit:N:FILE, the one with most bits first; none of other rules."""
    kind, *rest = (text or "").split(":")
    return [Path(part) for part in rest[1:] if part != "drop"] if kind == "lowbit" else []


def check_lossy(
    text: str | None,
    *,
    stock: bool,
    max_kl: float | None = None,
    host_kernels: str = "auto",
) -> None:
    """Raise UsageError unless it is None or a rule that the engine knows, and where it has no effect.

    `max_kl`: what it may cost in the mean, in nats per token; None: no limit.
    """
    if max_kl is not None:
        check_range(MAX_KL, max_kl, 1e-6, 100)
    if text is None and max_kl is not None:
        raise UsageError(f"{MAX_KL} {max_kl:g} limits what {FLAG} costs: give {FLAG}, too, or omit it")
    if text is None:
        return
    check_variable(VARIABLE, text, FLAG)
    if stock:
        raise UsageError(f"{FLAG} {text} has no effect with --stock, which computes every expert: omit one")
    if copies_of(text) and host_kernels == "ggml":
        raise UsageError(f"{FLAG} {text} needs the engine's kernels: leave out --host-kernels ggml")


def check_can_be_lossy(text: str | None, *, is_host_only: bool, ram_bytes: int | None) -> None:
    """Raise UsageError where every expert is there, or none that could stand in for another one.

    ModelError for files of `lowbit` that are none; whether they are the model's `copies_bytes` says.
    """
    if text is not None and is_host_only and ram_bytes is None:
        raise UsageError(
            f"{FLAG} {text} needs a device, or experts on disk (--ram): all are in memory; give a smaller "
            f"--ram, or omit {FLAG}"
        )
    if text is not None and is_host_only and text.startswith("substitute:"):
        raise UsageError(f"{FLAG} {text} needs a device, whose experts stand in for others: give drop:N")
    for path in copies_of(text):
        check_model_file(path)
