"""A sweep's runs, spread over processes or Dask workers: the same rows, and what happens to workers."""

from __future__ import annotations

import gc
import importlib.util
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import has_ended, wait_for
from tiny import make_trace
from typer.testing import CliRunner

from pyspac.cli import app
from pyspac.lab import spread_dask
from pyspac.lab.job import Job, Replay
from pyspac.lab.machine import PRESETS
from pyspac.lab.setup import Setup
from pyspac.lab.sweep import run_with_oracle
from pyspac.lab.trace_file import write_trace


@pytest.fixture(autouse=True)
def _closed_clients() -> None:
    """Dask's client that could not connect is closed here, not while the thread of the next one starts, which
    would wait for itself."""
    gc.collect()


needs_dask = pytest.mark.skipif(
    importlib.util.find_spec("distributed") is None, reason="no distributed installed (the extra `dask`)"
)
POLICY = """
import os, signal, time
from pathlib import Path
from pyspac.lab.policy import Eviction
from pyspac.lab.registry import register

@register({name!r})
class Own(Eviction):
    def on_access(self, access):
        {body}
"""
DIES = "os.kill(os.getpid(), signal.SIGKILL)"
SWEEP = ("--capacities", "10%,25%", "--k", "0")


def call(*args: object) -> Any:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def said(result: Any) -> str:
    """Its output, without the ends of lines that a console put in."""
    return " ".join(result.output.split())


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(3)
    tokens = [[[int(e) for e in rng.choice(8, 2, replace=False)] for _ in range(4)] for _ in range(12)]
    path = tmp_path_factory.mktemp("trace") / "tiny.parquet"
    write_trace(make_trace(tokens, status=np.array([0, 0] + [1] * 10, np.uint8)), path)
    return path


def policy_file(folder: Path, name: str, body: str) -> Path:
    path = folder / f"{name}.py"
    path.write_text(POLICY.format(name=name, body=body))
    return path


def make_job(trace_file: Path, capacity: str) -> Job:
    setup = Setup(eviction="lru", capacity=capacity)
    return Job(Replay(source=str(trace_file), k=0), setup, PRESETS["rtx4090"])


def test_workers_give_rows_in_order_and_say_how_far_they_are(trace_file: Path) -> None:
    jobs = [make_job(trace_file, f"{size}%") for size in (60, 25, 10)]
    seen: list[tuple[int, int]] = []
    rows = run_with_oracle(jobs, Setup(), n_workers=2, on_done=lambda *count: seen.append(count))
    assert rows == run_with_oracle(jobs, Setup(), n_workers=1)
    assert seen == [(n, 18) for n in range(1, 19)]  # each with the oracle's five


def test_a_worker_that_dies_is_an_error_that_names_the_run(trace_file: Path, tmp_path: Path) -> None:
    file = policy_file(tmp_path, "deadly", DIES)
    done = call("lab", "sweep", trace_file, "--policies", "deadly", *SWEEP, "-j", 2, "--policy-file", file)
    assert done.exit_code == 1
    assert "the run deadly at " in said(done)
    assert "on rtx4090, k=0 has no result: its worker was killed by SIGKILL" in said(done)
    assert not multiprocessing.active_children()


def test_a_run_that_fails_is_named_too(trace_file: Path, tmp_path: Path) -> None:
    file = policy_file(tmp_path, "broken", "raise ZeroDivisionError('by mistake')")
    done = call("lab", "sweep", trace_file, "--policies", "broken", *SWEEP, "-j", 2, "--policy-file", file)
    assert done.exit_code == 1
    assert "the run broken at " in said(done)
    assert "ZeroDivisionError: by mistake" in said(done)


def sweep_that_waits(trace_file: Path, folder: Path, stderr: Path) -> subprocess.Popen[bytes]:
    """A sweep in a process group of its own; each of its workers leaves its id in `folder` and waits."""
    file = policy_file(
        folder, "slow", f"(Path({str(folder)!r}) / f'{{os.getpid()}}.pid').touch(); time.sleep(99)"
    )
    argv = ["-m", "pyspac", "lab", "sweep", str(trace_file), "--policies", "slow", *SWEEP, "--jobs", "2"]
    with stderr.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, *argv, "--policy-file", str(file)],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip


@pytest.mark.usefixtures("hears_ctrl_c")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_ctrl_c_ends_all(trace_file: Path, tmp_path: Path, number: int, code: int) -> None:
    """And whoever is killed leaves nothing: workers see their pipes close once their run is over."""
    log = tmp_path / "log"
    with sweep_that_waits(trace_file, tmp_path, log) as process:
        workers = wait_for("the workers", lambda: len(list(tmp_path.glob("*.pid"))) == 2)
        workers = [int(path.stem) for path in tmp_path.glob("*.pid")]
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does: to all of them
        else:
            process.kill()
            for pid in workers:
                os.kill(pid, signal.SIGTERM)
        assert process.wait(30) == code
    for pid in workers:
        wait_for(f"the end of worker {pid}", lambda pid=pid: has_ended(pid), 10)
    assert "Traceback" not in log.read_text()


# ---- Dask


@contextmanager
def local_cluster(n_workers: int, allowed_failures: int) -> Iterator[str]:
    """Workers on this machine; their scheduler's address."""
    import dask
    from distributed import LocalCluster

    config = {
        "distributed.scheduler.allowed-failures": allowed_failures,
        "distributed.worker.daemon": True,
    }
    with (
        dask.config.set(config),
        LocalCluster(n_workers, threads_per_worker=2, host="127.0.0.1", dashboard_address=None) as local,
    ):
        yield local.scheduler_address


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with local_cluster(n_workers=2, allowed_failures=0) as address:
        yield address


@needs_dask
@pytest.mark.slow
def test_dask_gives_the_same_rows(cluster: str, trace_file: Path, tmp_path: Path) -> None:
    file = policy_file(tmp_path, "plain", "self.worth[access.demand.keys] += 1")
    args = ("lab", "sweep", trace_file, "--policies", "lru,ema,plain", *SWEEP, "--policy-file", file)
    for name, where in (("serial", ("-j", 1)), ("dask", ("--dask", cluster))):
        done = call(*args, *where, "-o", tmp_path / f"{name}.json")
        assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "dask.json").read_text()) == json.loads(
        (tmp_path / "serial.json").read_text()
    )


@needs_dask
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "body", "text"),
    [
        ("deadly-there", DIES, "has no result: its worker died"),
        ("broken-there", "raise ZeroDivisionError('by mistake')", "ZeroDivisionError: by mistake"),
    ],
)
def test_dask_names_the_run(
    cluster: str, trace_file: Path, tmp_path: Path, name: str, body: str, text: str
) -> None:
    file = policy_file(tmp_path, name, body)
    done = call(
        "lab", "sweep", trace_file, "--policies", name, *SWEEP, "--dask", cluster, "--policy-file", file
    )
    assert done.exit_code == 1
    assert "the run " in said(done)  # one of the oracle's may have been with that worker
    assert "% on rtx4090, k=0 " in said(done)
    assert text in said(done)


@needs_dask
@pytest.mark.slow
def test_all_workers_die_and_come_again(trace_file: Path, tmp_path: Path) -> None:
    """The trace goes to them once more."""
    mark = tmp_path / "died"
    body = f"mark = Path({str(mark)!r}); mark.exists() or (mark.touch(), {DIES})"
    file = policy_file(tmp_path, "dies-once", body)
    with local_cluster(n_workers=1, allowed_failures=3) as address:
        done = call(
            "lab", "sweep", trace_file, "--policies", "dies-once", *SWEEP, "--dask", address,
            "--policy-file", file,
        )  # fmt: skip
    assert mark.exists()
    assert done.exit_code == 0, done.output


@needs_dask
@pytest.mark.slow
def test_somebody_restarts_the_scheduler(cluster: str, trace_file: Path, tmp_path: Path) -> None:
    from distributed import Client

    def restart() -> None:
        wait_for("a run", lambda: list(tmp_path.glob("*.pid")))
        with Client(cluster) as client:
            client.restart()

    file = policy_file(
        tmp_path, "waits", f"(Path({str(tmp_path)!r}) / f'{{os.getpid()}}.pid').touch(); time.sleep(99)"
    )
    other = threading.Thread(target=restart)
    other.start()
    done = call(
        "lab", "sweep", trace_file, "--policies", "waits", *SWEEP, "--dask", cluster, "--policy-file", file
    )
    other.join()
    assert done.exit_code == 1
    assert "has no result: it was cancelled at the scheduler" in said(done)


@needs_dask
@pytest.mark.parametrize("address", ["nonsense", "tcp://127.0.0.1:1"])
def test_a_scheduler_that_is_not_there(
    trace_file: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setattr(spread_dask, "CONNECT_S", 0.5)
    done = call("lab", "sweep", trace_file, "--policies", "lru", *SWEEP, "--dask", address)
    assert done.exit_code == 2
    assert f"--dask cannot be '{address}': give the address of a Dask scheduler that runs" in said(done)


@needs_dask
@pytest.mark.slow
def test_a_scheduler_without_workers(trace_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from distributed import LocalCluster

    monkeypatch.setattr(spread_dask, "CONNECT_S", 1.0)
    with LocalCluster(n_workers=0, host="127.0.0.1", dashboard_address=None) as local:
        address = local.scheduler_address
        done = call("lab", "sweep", trace_file, "--policies", "lru", *SWEEP, "--dask", address)
    assert done.exit_code == 1
    assert "has no workers: start some with `dask worker" in said(done)


def test_dask_is_said_to_be_missing(trace_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    done = call("lab", "sweep", trace_file, "--policies", "lru", *SWEEP, "--dask", "tcp://127.0.0.1:1")
    assert done.exit_code == 1
    assert "--dask needs distributed: install it with `pip install 'pyspac[dask]'`" in said(done)


def test_dask_and_jobs_do_not_go_together(trace_file: Path) -> None:
    done = call("lab", "sweep", trace_file, "--dask", "tcp://127.0.0.1:1", "--jobs", 2)
    assert done.exit_code == 2
    assert "--dask tcp://127.0.0.1:1 has workers of its own: leave --jobs 2 out" in said(done)
