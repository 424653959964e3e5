"""What a scheduler learned, kept over a restart of the server.

In: a model's file and a scheduler. Out: a file in the cache folder, named by the model's content; at the next
start the estimator begins where it was, so that the experts which were useful last are loaded first. Servers
that share the folder share the file, and each starts with what all have learned.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pyspac.scheduler.scheduler import Scheduler
from pyspac.server import log
from pyspac.server.model_identity import cache_folder, model_hash

FORMAT: Final = 2  # 1 held settings beside what was learned
LOCK_S: Final = 2.0  # writing takes milliseconds
_STATE: Final = "state."
_PREDICTED: Final = "predictor."
_FALLBACK: Final = "fallback."
_HEADER_KEYS: Final = ("format", "estimator", "n_levels", "gamma")


def open_store(model: Path | None) -> UtilityStore | None:
    """The store of a model; None without one, or if its file cannot be read, which is said."""
    if model is None:
        return None
    try:
        return UtilityStore(cache_folder() / "utilities" / f"{model_hash(model)}.npz")
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        log.warning(f"no warm start: {error}")
        return None


@dataclass(slots=True)
class UtilityStore:
    """One model's file, which several servers may share."""

    path: Path
    _seen: tuple[int, int] | None = None  # the file that was read or written last, as `_version` tells it

    def keep(self, scheduler: Scheduler) -> None:
        """Write the file, all or nothing. Raises OSError.

        If another process has written it meanwhile, what that one learned stays in it, by half.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(self.path.parent):
            arrays = _to_arrays(scheduler, self._of_others())
            descriptor, name = tempfile.mkstemp(dir=self.path.parent, suffix=".tmp")
            try:
                with os.fdopen(descriptor, "wb") as file:
                    np.savez(file, allow_pickle=False, **arrays)
                Path(name).replace(self.path)
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
            self._seen = _version(self.path)

    def _of_others(self) -> dict[str, NDArray[Any]]:
        """The file, if another process wrote it since it was seen here; empty if not, or if unreadable."""
        if _version(self.path) in (None, self._seen):
            return {}
        try:
            return _read(self.path)
        except Exception:  # as in `recall`
            return {}

    def recall(self, scheduler: Scheduler) -> bool:
        """Whether there was a file that fits; one that does not changes nothing, and is said."""
        if not self.path.is_file():
            return False
        self._seen = _version(self.path)
        try:
            arrays = _read(self.path)
        except Exception as error:  # a damaged zip raises one of many kinds
            log.warning(f"no warm start: {self.path} cannot be read ({error}); it is replaced at the end")
            return False
        if reason := _restore(scheduler, arrays):
            log.warning(f"no warm start: {self.path} {reason}; it is replaced at the end")
            return False
        return True


def _read(path: Path) -> dict[str, NDArray[Any]]:
    with np.load(path, allow_pickle=False) as archive:
        return dict(archive)


def _version(path: Path) -> tuple[int, int] | None:
    """Which file is there: every writer puts a new one in its place. None: none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One writer at a time; others do not wait long for one that is held up, or where there are no locks."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        end_s = time.monotonic() + LOCK_S
        while time.monotonic() < end_s:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:
                break
        yield
    finally:
        os.close(descriptor)


def _header(scheduler: Scheduler) -> dict[str, NDArray[Any]]:
    config = scheduler.config
    gamma = config.gamma if config.estimator == "spac" else 0  # its boundaries begin at gamma / 2
    values = (FORMAT, config.estimator, config.effective_levels, gamma)
    return {name: np.asarray(value) for name, value in zip(_HEADER_KEYS, values, strict=True)}


def _to_arrays(scheduler: Scheduler, others: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """What it has learned, together with a file's; `others` of another format or estimator are left out."""
    header = _header(scheduler)
    others = {} if _misfit(header, others) else others
    state = scheduler.estimator.averaged(_with_prefix(others, _STATE))
    arrays = header | {f"{_STATE}{name}": value for name, value in state.items()}
    if scheduler.foresight is not None:
        predictor = scheduler.foresight.predictor
        prefix = f"{_PREDICTED}{predictor.name}."
        merged = predictor.merged(_with_prefix(others, prefix))
        arrays |= {f"{prefix}{name}": value for name, value in merged.items()}
    arrays |= {name: value for name, value in others.items() if name.startswith(_FALLBACK)}
    fallback = scheduler.fallback
    if fallback is not None and fallback.gain is not None:
        found = {"chosen": fallback.chosen, "gain": fallback.gain, "where": _where(scheduler)}
        arrays |= {f"{_FALLBACK}{name}": np.asarray(value) for name, value in found.items()}
    return arrays


def _misfit(header: dict[str, NDArray[Any]], arrays: dict[str, NDArray[Any]]) -> str | None:
    """Why a file's arrays are not for a scheduler with this header; None: they are."""
    for name, wanted in header.items():
        found = arrays[name].tolist() if name in arrays else None
        if found != wanted.tolist():
            return f"has {name} {found!r}, this run needs {wanted.tolist()!r}"
    return None


def _restore(scheduler: Scheduler, arrays: dict[str, NDArray[Any]]) -> str | None:
    """Put a file's state back; or what is wrong with the file."""
    if reason := _misfit(_header(scheduler), arrays):
        return reason
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
