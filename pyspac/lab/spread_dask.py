"""Jobs in, rows out as they come, from the workers of a Dask scheduler.

Workers may be on other machines: what a run reads, the trace and files of policies, is sent to each of them
once, as bytes, and lies in a folder of its process. They need this version of pyspac.
"""

from __future__ import annotations

import atexit
import hashlib
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import pyspac
from pyspac.errors import ConfigError, PyspacError
from pyspac.lab.job import Job, Row
from pyspac.lab.registry import load_file
from pyspac.lab.spread import JobError, run_to_text

CONNECT_S: Final = 10.0
LOOK_S: Final = 1.0  # how often to look whether there are workers
ALONE_S: Final = 30.0  # how long none may be there: one that died may be started again
_ONE_AT_A_TIME: Final = threading.Lock()  # runs compute in Python, and share what is cached


@dataclass(frozen=True, slots=True)
class Parcel:
    """Files for workers: names and contents, those of policies first."""

    names: tuple[str, ...]
    contents: tuple[bytes, ...]
    n_policies: int

    @classmethod
    def of(cls, policies: Sequence[Path], traces: Sequence[str]) -> Parcel:
        """Raises OSError."""
        paths = [*policies, *map(Path, traces)]
        contents = tuple(path.read_bytes() for path in paths)
        return cls(tuple(path.name for path in paths), contents, len(policies))

    def digest(self) -> str:
        """The same for the same files."""
        parts = (hashlib.sha256(part).digest() for part in (*map(str.encode, self.names), *self.contents))
        return hashlib.sha256(b"".join(parts)).hexdigest()


def run_on_dask(
    jobs: Sequence[Job], address: str, policy_files: tuple[Path, ...] = ()
) -> Iterator[tuple[int, Row]]:
    """Yield (index, row) as runs end, by the workers of the scheduler at `address`.

    Raises ConfigError for an address that nothing answers at, PyspacError without the package or workers that
    fit, JobError for the first run that fails.
    """
    sources = sorted({job.replay.source for job in jobs})
    parcel = Parcel.of(policy_files, sources)
    with _client(address) as client:
        _check_workers(client, address)
        sent = client.submit(_as_sent, parcel, pure=False)  # the scheduler sends it again if all workers died
        numbers = {source: len(policy_files) + i for i, source in enumerate(sources)}
        digest = parcel.digest()
        pending = {
            client.submit(_run_there, job, numbers[job.replay.source], digest, sent, pure=False): index
            for index, job in enumerate(jobs)
        }
        try:
            yield from _gather(client, jobs, pending)
        finally:
            client.cancel(list(pending), force=True)


def _gather(client: Any, jobs: Sequence[Job], pending: dict[Any, int]) -> Iterator[tuple[int, Row]]:
    """Results as they come; `pending` keeps those that are still to come."""
    from distributed import wait

    seen_s = time.monotonic()
    while pending:
        try:
            done = wait(list(pending), timeout=LOOK_S, return_when="FIRST_COMPLETED").done
        except CancelledError as cancelled:
            job = jobs[next(iter(pending.values()))]
            raise JobError(job, "has no result: it was cancelled at the scheduler") from cancelled
        except TimeoutError:
            if client.scheduler_info()["workers"]:
                seen_s = time.monotonic()
            elif time.monotonic() - seen_s > ALONE_S:
                job = jobs[next(iter(pending.values()))]
                raise JobError(job, f"has no result: no worker has been there for {ALONE_S:.0f} s") from None
            continue
        for future in done:
            index = pending.pop(future)
            yield index, _result(future, jobs[index])


def _result(future: Any, job: Job) -> Row:
    """What came of a job. Raises JobError."""
    from distributed import KilledWorker

    try:
        row, error = future.result()
    except KilledWorker as killed:
        raise JobError(job, "has no result: its worker died, as did those that tried it again") from killed
    except Exception as failed:
        raise JobError(job, f"has no result: {failed!r}") from failed
    if error is not None:
        raise JobError(job, f"failed: {error}")
    return dict(row)


@contextmanager
def _client(address: str) -> Iterator[Any]:
    try:
        from distributed import Client
    except ImportError as error:
        raise PyspacError("--dask needs distributed: install it with `pip install 'pyspac[dask]'`") from error
    try:
        client = Client(address, timeout=CONNECT_S)
    except (OSError, ValueError) as error:
        raise ConfigError(
            "--dask",
            address,
            f"the address of a Dask scheduler that runs, such as tcp://127.0.0.1:8786 ({error})",
        ) from error
    with client:
        yield client


def _check_workers(client: Any, address: str) -> None:
    """Raise PyspacError unless there are workers, all with this version of pyspac."""
    try:
        client.wait_for_workers(1, timeout=CONNECT_S)
    except TimeoutError:
        raise PyspacError(
            f"the Dask scheduler at {address} has no workers: "
            f"start some with `dask worker {address} --nthreads 1`"
        ) from None
    for worker, version in client.run(_version, on_error="return").items():
        if version != pyspac.__version__:
            raise PyspacError(
                f"the Dask worker {worker} has no pyspac {pyspac.__version__} ({version}): "
                "install the same version for all workers"
            )


def _version() -> str:
    """Of the worker's pyspac; the function comes by name, so without pyspac it fails."""
    return pyspac.__version__


def _as_sent(parcel: Parcel) -> Parcel:
    return parcel


def _run_there(job: Job, number: int, digest: str, parcel: Parcel) -> tuple[Row | None, str | None]:
    """On a worker: as `run_to_text`, with file `number` of the parcel as the trace."""
    with _ONE_AT_A_TIME:
        folder = _folder(digest)
        source = folder / str(number) / parcel.names[number]
        if not source.is_file():
            _unpack(parcel, folder)
        return run_to_text(replace(job, replay=replace(job.replay, source=str(source))))


def _unpack(parcel: Parcel, folder: Path) -> None:
    for number, (name, content) in enumerate(zip(parcel.names, parcel.contents, strict=True)):
        path = folder / str(number) / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        if number < parcel.n_policies:
            load_file(path)


@cache
def _folder(_digest: str) -> Path:
    """One per parcel and process; it goes with the process."""
    folder = tempfile.TemporaryDirectory(prefix="pyspac-lab-")
    atexit.register(folder.cleanup)
    return Path(folder.name)
