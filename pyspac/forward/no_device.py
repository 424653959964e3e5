"""Settings that have no effect where no device holds experts. They are refused: an error, not silence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from pyspac.engine.values import read_device_kind
from pyspac.errors import UsageError
from pyspac.scheduler.config import SchedulerConfig

_DEFAULTS = SchedulerConfig()


def is_host_only(device: str) -> bool:
    """Whether `--device` asks for none; auto may turn out to be none too."""
    return read_device_kind(device) == "none"


def check_no_device(
    *,
    host_kernels: str,
    cache: str,
    scheduler: SchedulerConfig,
    copy_gb_s: Sequence[float] = (),
    without_engine: str,
) -> None:
    """Raise UsageError for a setting that needs a device; `without_engine`: how to run ggml's kernels.

    Predictors, which may read from disk, are left to `check_can_predict`, once the model's size is known.
    """
    if host_kernels == "ggml":
        raise UsageError(
            "without a device the engine's own kernels compute the experts: leave out --host-kernels ggml, "
            f"or {without_engine}"
        )
    for text in _in_vain(cache, scheduler, copy_gb_s):
        raise UsageError(
            f"{text} needs a device that holds experts, and there is none (no GPU was found, or --device "
            "none was given): leave it out, or try the split on the CPU with --device emulated"
        )


def can_predict(*, is_host_only: bool, ram_bytes: int | None) -> bool:
    """Whether the engine can fetch experts ahead, to a device or from disk; else memory holds all."""
    return not is_host_only or ram_bytes is not None


def check_can_predict(predict: Iterable[str], ram: str | None, *, can: bool) -> str:
    """Return a sentence where what was asked for with `--ram` leaves nothing to predict, else "".

    `can`: as of `can_predict`. Raises UsageError where `--ram` was not given.
    """
    names = ",".join(predict)
    if can or not names:
        return ""
    if ram is None:
        raise UsageError(
            f"--predict {names} needs a device, or experts on disk: give --ram (--ram auto) or leave it out"
        )
    return f"--predict {names} has no effect, as all experts are in memory with --ram {ram}"


def _in_vain(cache: str, scheduler: SchedulerConfig, copy_gb_s: Sequence[float]) -> Iterator[str]:
    if cache not in ("auto", "0"):
        yield f"--cache {cache}"
    others = replace(
        _DEFAULTS,
        without=scheduler.without & {"sd"},
        predict=scheduler.predict,
        n_draft_max=scheduler.n_draft_max,
    )
    if scheduler != others or any(copy_gb_s):
        yield "--policy"
