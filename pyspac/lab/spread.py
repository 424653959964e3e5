"""Jobs in, rows out as they come, from worker processes of this machine.

Every worker has a pipe of its own and one job at a time, so that of a worker that dies it is known what it
was at. Workers never outlive the sweep: they are ended when it ends, and a closed pipe ends one by itself.
"""

from __future__ import annotations

import contextlib
import signal
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing import connection, get_context, resource_tracker
from pathlib import Path
from typing import Any, Final

from pyspac.errors import PyspacError
from pyspac.lab.job import Job, Row, run_job
from pyspac.lab.registry import load_file

_CONTEXT: Final = get_context("spawn")  # a fork would share locks of threads that it does not have
_END_S: Final = 5.0


class JobError(PyspacError):
    """A run of a sweep failed, or the worker that was at it is gone."""

    def __init__(self, job: Job, text: str) -> None:
        """`text`: what happened, to go behind the job's name."""
        super().__init__(f"the run {job} {text}")


class _Worker:
    """A process that runs one job after the other."""

    def __init__(self, policy_files: tuple[Path, ...]) -> None:
        self.pipe, theirs = _CONTEXT.Pipe()
        self.index = -1  # of the job that it is at
        self.process = _CONTEXT.Process(target=_work, args=(theirs, policy_files), daemon=True)
        self.process.start()
        theirs.close()  # only the worker holds it, so that its end is seen here

    def start(self, index: int, job: Job) -> None:
        self.index = index
        with contextlib.suppress(OSError):  # it is gone: its pipe is at its end, which the next look says
            self.pipe.send(job)

    def result(self, job: Job) -> Row:
        """What came of `job`. Raises JobError."""
        try:
            row, error = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(_END_S)
            raise JobError(job, f"has no result: {self._end_text()}") from None
        if error is not None:
            raise JobError(job, f"failed: {error}")
        return dict(row)

    def _end_text(self) -> str:
        code = self.process.exitcode
        if code is not None and code < 0:
            hint = "; often memory has run out, then fewer --jobs help" if code == -signal.SIGKILL else ""
            return f"its worker was killed by {signal.Signals(-code).name}{hint}"
        return f"its worker exited with code {code}"

    def stop(self) -> None:
        self.pipe.close()
        self.process.terminate()
        self.process.join(_END_S)
        if self.process.is_alive():  # it was stopped, or hangs in the kernel
            self.process.kill()
            self.process.join(_END_S)


def run_in_processes(
    jobs: Sequence[Job], n_workers: int, policy_files: tuple[Path, ...] = ()
) -> Iterator[tuple[int, Row]]:
    """Yield (index, row) as runs end. Raises JobError for the first run that fails."""
    workers: list[_Worker] = []
    try:
        with _without_interrupts():
            workers += [_Worker(policy_files) for _ in range(min(n_workers, len(jobs)))]
        yield from _run(jobs, workers)
    finally:
        for worker in workers:
            worker.stop()


def _run(jobs: Sequence[Job], workers: Sequence[_Worker]) -> Iterator[tuple[int, Row]]:
    waiting = deque(enumerate(jobs))
    busy: dict[Any, _Worker] = {}
    for worker in workers:
        worker.start(*waiting.popleft())
        busy[worker.pipe] = worker
    while busy:
        for pipe in connection.wait(list(busy)):
            worker = busy.pop(pipe)
            index = worker.index
            row = worker.result(jobs[index])
            if waiting:
                worker.start(*waiting.popleft())
                busy[pipe] = worker
            yield index, row


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """What starts meanwhile never hears of Ctrl-C, which a terminal sends to all: we end it."""
    resource_tracker.ensure_running()  # else the first worker starts it, which unblocks the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(pipe: Any, policy_files: tuple[Path, ...]) -> None:
    """A worker's life: jobs come, (row, None) or (None, text) goes."""
    for path in policy_files:
        load_file(path)
    with contextlib.suppress(EOFError, OSError):  # the sweep is over
        while True:
            pipe.send(run_to_text(pipe.recv()))


def run_to_text(job: Job) -> tuple[Row | None, str | None]:
    """The row and None, or None and what went wrong, as text: not every exception can be sent."""
    try:
        return run_job(job), None
    except PyspacError as error:
        return None, str(error)
    except Exception:  # a bug, of ours or of a policy file
        return None, traceback.format_exc()
