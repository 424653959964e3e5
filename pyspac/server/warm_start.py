"""What a scheduler learned, kept over a restart of the server.

In: a model's file and a scheduler. Out: a file in the cache folder, named by the model's content; at the next
start the estimator begins where it was, so that the experts which were useful last are loaded first.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pyspac.scheduler.scheduler import Scheduler
from pyspac.server import log

FORMAT: Final = 2  # 1 held settings beside what was learned
HEADER_BYTES: Final = 8 << 20  # the largest vocabularies take 6 MB
N_SAMPLES: Final = 64
SAMPLE_BYTES: Final = 4096
_STATE: Final = "state."
_PREDICTED: Final = "predictor."
_FALLBACK: Final = "fallback."
_HEADER_KEYS: Final = ("format", "estimator", "n_levels", "gamma")


def cache_folder() -> Path:
    """$PYSPAC_CACHE_DIR, else pyspac in $XDG_CACHE_HOME or ~/.cache."""
    named = os.environ.get("PYSPAC_CACHE_DIR")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pyspac"


def model_hash(path: Path) -> str:
    """A fast hash of a model's content: of each file its size, its beginning and 64 samples of 4 KiB.

    The beginning holds the header: metadata, names, types and shapes. Reading 20 GB takes longer than a warm
    start can save. Two models that differ in few weights only may collide; the worst that follows is a start
    with the other's utilities. Raises OSError.
    """
    digest = hashlib.sha256()
    for part in _parts(path):
        _add(digest, part)
    return digest.hexdigest()


def _parts(path: Path) -> list[Path]:
    """The files of a split model, or the one file."""
    match = re.fullmatch(r"(.*)-00001-of-(\d{5})\.gguf", path.name)
    if match is None:
        return [path]
    return [path.with_name(f"{match[1]}-{i:05d}-of-{match[2]}.gguf") for i in range(1, int(match[2]) + 1)]


def _add(digest: Any, path: Path) -> None:
    n_bytes = path.stat().st_size
    digest.update(str(n_bytes).encode())
    with path.open("rb") as file:
        digest.update(file.read(HEADER_BYTES))
        for i in range(N_SAMPLES):
            file.seek(i * max(0, n_bytes - SAMPLE_BYTES) // (N_SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))


def open_store(model: Path | None) -> UtilityStore | None:
    """The store of a model; None without one, or if its file cannot be read, which is said."""
    if model is None:
        return None
    try:
        return UtilityStore(cache_folder() / "utilities" / f"{model_hash(model)}.npz")
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        log.warning(f"no warm start: {error}")
        return None


@dataclass(frozen=True, slots=True)
class UtilityStore:
    """One model's file."""

    path: Path

    def keep(self, scheduler: Scheduler) -> None:
        """Write the file, all or nothing. Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=self.path.parent, suffix=".tmp")
        try:
            with os.fdopen(descriptor, "wb") as file:
                np.savez(file, allow_pickle=False, **_to_arrays(scheduler))
            Path(name).replace(self.path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def recall(self, scheduler: Scheduler) -> bool:
        """Whether there was a file that fits; one that does not changes nothing, and is said."""
        if not self.path.is_file():
            return False
        try:
            with np.load(self.path, allow_pickle=False) as archive:
                arrays = dict(archive)
        except Exception as error:  # a damaged zip raises one of many kinds
            log.warning(f"no warm start: {self.path} cannot be read ({error}); it is replaced at the end")
            return False
        if reason := _restore(scheduler, arrays):
            log.warning(f"no warm start: {self.path} {reason}; it is replaced at the end")
            return False
        return True


def _header(scheduler: Scheduler) -> dict[str, NDArray[Any]]:
    config = scheduler.config
    gamma = config.gamma if config.estimator == "spac" else 0  # its boundaries begin at gamma / 2
    values = (FORMAT, config.estimator, config.effective_levels, gamma)
    return {name: np.asarray(value) for name, value in zip(_HEADER_KEYS, values, strict=True)}


def _to_arrays(scheduler: Scheduler) -> dict[str, NDArray[Any]]:
    state = scheduler.estimator.state()
    arrays = _header(scheduler) | {f"{_STATE}{name}": value for name, value in state.items()}
    if scheduler.foresight is not None:
        predictor = scheduler.foresight.predictor
        prefix = f"{_PREDICTED}{predictor.name}."
        arrays |= {f"{prefix}{name}": value for name, value in predictor.state().items()}
    fallback = scheduler.fallback
    if fallback is not None and fallback.gain is not None:
        found = {"chosen": fallback.chosen, "gain": fallback.gain, "where": _where(scheduler)}
        arrays |= {f"{_FALLBACK}{name}": np.asarray(value) for name, value in found.items()}
    return arrays


def _restore(scheduler: Scheduler, arrays: dict[str, NDArray[Any]]) -> str | None:
    """Put a file's state back; or what is wrong with the file."""
    for name, wanted in _header(scheduler).items():
        found = arrays[name].tolist() if name in arrays else None
        if found != wanted.tolist():
            return f"has {name} {found!r}, this run needs {wanted.tolist()!r}"
    if not scheduler.estimator.restore(_with_prefix(arrays, _STATE)):
        return "is of another geometry, or of other settings of the estimator"
    if scheduler.foresight is not None:  # one that was not at work then has nothing there, and starts anew
        predictor = scheduler.foresight.predictor
        predictor.restore(_with_prefix(arrays, f"{_PREDICTED}{predictor.name}."))
    found = {name: array.tolist() for name, array in _with_prefix(arrays, _FALLBACK).items()}
    if scheduler.fallback is not None and found.get("where") == _where(scheduler):
        scheduler.fallback.remember(found["chosen"], found["gain"])
    return None


def _where(scheduler: Scheduler) -> str:
    """What a finding about copies holds for: the machine, and how many experts fit onto its device."""
    return f"{platform.node()}, {os.cpu_count()} cores, {scheduler.board.n_slots} slots"


def _with_prefix(arrays: dict[str, NDArray[Any]], prefix: str) -> dict[str, NDArray[Any]]:
    """Those whose names begin so, without that beginning."""
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
