"""`pyspac serve` when things go wrong: killed, stopped, doubled, and boards that cannot be trusted."""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from serving import (
    DRAFT,
    HOST,
    ONE_THREAD,
    TARGET,
    Serve,
    assert_nothing_left,
    complete,
    environment,
    free_port,
    llama_server,
    run_pyspac,
    wait_for,
)

from pyspac.engine.board import Board
from pyspac.errors import PyspacError
from pyspac.server import board_file
from pyspac.server.arguments import Launch
from pyspac.server.backoff import Backoff
from pyspac.server.child import Child
from pyspac.server.health import is_healthy
from pyspac.server.options import ServeOptions
from pyspac.server.supervisor import EXIT_INTERRUPTED, FIRST_STARTS, Signals, Supervisor
from tools.soak import namespace

BACK_S = 2.0


@contextmanager
def answering(serve: Serve, n_predict: int) -> Iterator[Future[dict[str, Any]]]:
    """A long answer under way."""
    with ThreadPoolExecutor(1) as pool, Board.open(serve.board) as board:
        before = int(board.counters["n_forward"][0])
        future = pool.submit(complete, serve.port, n_predict)
        wait_for("tokens", lambda: int(board.counters["n_forward"][0]) > before + 3)
        yield future


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """One that survives what its tests do to it."""
    with Serve(tmp_path_factory.mktemp("faults")) as serve:
        yield serve.wait_ready()


def kill_scheduler_and_time_its_return(serve: Serve) -> float:
    """Seconds from the kill to the new scheduler's first decision on the board."""
    n_before = sum(event.get("event") == "attached" for event in serve.events)
    os.kill(serve.scheduler_pid, signal.SIGKILL)
    start = time.monotonic()
    wait_for("a new scheduler", lambda: serve.event("attached", n_before))
    return time.monotonic() - start


def test_a_killed_scheduler_comes_back_and_the_answer_completes(served: Serve) -> None:
    with answering(served, 400) as answer:
        seconds = kill_scheduler_and_time_its_return(served)
        assert answer.result()["tokens_predicted"] == 400
    assert served.event("scheduler_died") is not None
    for _ in range(2):  # a machine that is busy with other work is given two more chances
        if seconds > BACK_S:
            time.sleep(11)  # else the back-off counts as well
            seconds = kill_scheduler_and_time_its_return(served)
    assert seconds <= BACK_S


def test_decisions_of_a_new_scheduler_take_effect(served: Serve) -> None:
    with Board.open(served.board) as board:
        before = int(board.counters["n_decisions"][0])
        complete(served.port, 64)
        assert int(board.counters["n_decisions"][0]) > before


def test_answers_go_on_while_the_scheduler_is_stopped(served: Serve) -> None:
    pid = served.scheduler_pid
    os.kill(pid, signal.SIGSTOP)
    try:
        assert complete(served.port, 64)["tokens_predicted"] == 64
        assert served.scheduler_pid == pid
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_second_scheduler_is_refused(served: Serve, tmp_path: Path) -> None:
    done = run_pyspac("attach", served.board, cache_dir=tmp_path)
    assert done.returncode == 1
    assert "has a scheduler already" in done.stderr


@pytest.mark.parametrize("same", ["board", "port"])
def test_a_name_or_port_in_use_is_refused(served: Serve, tmp_path: Path, same: str) -> None:
    value = {"board": served.board, "port": str(served.port)}[same]
    done = run_pyspac("serve", "-m", str(TARGET), "--device", "cpu", f"--{same}", value, cache_dir=tmp_path)
    assert done.returncode == 2
    assert "in use" in done.stderr
    assert served.process.poll() is None


def test_the_engine_refuses_a_board_in_use(served: Serve, bin_dir: Path, tmp_path: Path) -> None:
    """Past `pyspac serve`: llama-server itself, with the board's name of a running one."""
    argv = [bin_dir / "llama-server", "-m", TARGET, "--device", "none", "--spac-cache", "25%"]
    argv += ["--spac-board", served.board, "--host", HOST, "--port", "0"]
    env = {**os.environ, "PYSPAC_DEVICE": "emulated"}
    done = subprocess.run(list(map(str, argv)), env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "is in use by process" in done.stdout + done.stderr


@contextmanager
def forged_board(name: str, served: Serve) -> Iterator[np.memmap]:
    """A copy of a board under another name, to be changed as bytes; locked, as a running engine's is."""
    path = board_file.path_of(name)
    shutil.copyfile(board_file.path_of(served.board), path)
    whole_file = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        with path.open("r+b") as file:
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, whole_file)
            yield np.memmap(path, np.uint8, "r+")
    finally:
        path.unlink()


def test_a_board_of_another_abi_version_is_refused(served: Serve, tmp_path: Path) -> None:
    name = f"forged-abi-{os.getpid()}"
    with forged_board(name, served) as content:
        content[8:12].view(np.uint32)[0] += 1  # header: magic u64, ABI version u32
        content.flush()
        done = run_pyspac("attach", name, cache_dir=tmp_path)
        assert done.returncode == 1
        assert "ABI version" in done.stderr


def test_an_older_layout_of_the_board_is_refused(served: Serve, tmp_path: Path) -> None:
    """As of a build before the newest fields, whose server goes on."""
    name = f"forged-layout-{os.getpid()}"
    with forged_board(name, served) as content:
        n_bytes = len(content) - 256
        content[16:24].view(np.uint64)[0] = n_bytes  # header: size
        content.flush()
        os.truncate(board_file.path_of(name), n_bytes)
        done = run_pyspac("attach", name, cache_dir=tmp_path)
        assert done.returncode == 1
        assert "comes from another build of pyspac" in done.stderr
        assert "use the same build on both sides" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_board_of_another_geometry_is_refused(served: Serve) -> None:
    name = f"forged-size-{os.getpid()}"
    with forged_board(name, served) as content:
        content[24:28].view(np.uint32)[0] *= 4  # header: pid i32, size u64, n_layer u32
        content.flush()
        with pytest.raises(PyspacError, match="layers"):
            Board.open(name)


def test_a_cut_off_board_is_refused(served: Serve) -> None:
    name = f"forged-cut-{os.getpid()}"
    with forged_board(name, served):
        os.truncate(board_file.path_of(name), 4096)
        with pytest.raises(PyspacError, match=name):
            Board.open(name)


def test_answers_go_on_while_the_board_is_truncated(tmp_path: Path) -> None:
    """The server does not die, and the board is whole again for the next scheduler."""
    with Serve(tmp_path) as serve:
        serve.wait_ready()
        path = board_file.path_of(serve.board)
        n_bytes = path.stat().st_size
        with answering(serve, 200) as answer:
            for size in (0, 1, 4096, n_bytes - 1, 0):
                os.truncate(path, size)
                time.sleep(0.02)
            assert answer.result()["tokens_predicted"] == 200
        assert complete(serve.port, 200)["tokens_predicted"] == 200
        wait_for("the board's size", lambda: path.stat().st_size == n_bytes)
        wait_for("a scheduler", lambda: serve.scheduler_pid and psutil.pid_exists(serve.scheduler_pid))
        path.unlink()
        assert complete(serve.port, 200)["tokens_predicted"] == 200
        assert serve.stop() == 0


def test_no_such_board(tmp_path: Path) -> None:
    done = run_pyspac("attach", "nobody-has-this", cache_dir=tmp_path)
    assert done.returncode == 1
    assert "no running server has the board" in done.stderr


# values that break code which trusts them: the ends of the ranges, signs, and each state of an expert
EDGES = np.array([0x00, 0x01, 0x02, 0x03, 0x04, 0x7F, 0x80, 0xFE, 0xFF], np.uint8)


def nonsense(rng: np.random.Generator, n: int) -> np.ndarray:
    """[n] bytes: random ones, one value all over, or random edges."""
    match rng.integers(3):
        case 0:
            return rng.integers(0, 256, n, np.uint8)
        case 1:
            return np.full(n, rng.choice(EDGES), np.uint8)
    return rng.choice(EDGES, n)


def scheduler_arrays(board: Board) -> list[np.ndarray]:
    """What a scheduler may write."""
    return [board.utility, board.tau, board.load, board.n_load, board.byte_budget, board.n_draft_max]


def whole_board(board: Board, name: str) -> list[np.ndarray]:
    """Each array by itself, the engine's own included, and then every byte of the file: the header too."""
    content = np.memmap(board_file.path_of(name), np.uint8, "r+")
    arrays = [
        board.counts, board.residency, board.expert_bytes, board.group, board.group_slots, board.layer_stats,
        board.counters, board.records, board.n_records,
    ]  # fmt: skip
    base = min(array.ctypes.data for array in arrays) // mmap.PAGESIZE * mmap.PAGESIZE
    offsets = [array.ctypes.data - base for array in arrays]  # these are read-only in `board`
    parts = [content[at : at + array.nbytes] for at, array in zip(offsets, arrays, strict=True)]
    return [*scheduler_arrays(board), *parts, content]


@contextmanager
def scribbling(board: Board, arrays: list[np.ndarray], seed: int) -> Iterator[None]:
    """Nonsense into the arrays meanwhile, as fast as it goes, in whole decisions and in half ones."""
    raw = [array.reshape(-1).view(np.uint8) for array in arrays]
    rng, stop = np.random.default_rng(seed), threading.Event()

    def scribble() -> None:
        while not stop.is_set():
            if rng.random() < 0.5:
                board._lib.spac_decision_begin(board._handle)
            for content in raw:
                if rng.random() < 0.7:
                    content[:] = nonsense(rng, len(content))
            if rng.random() < 0.8:
                board._lib.spac_decision_end(board._handle)
            time.sleep(0.0005)

    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(scribble)
        try:
            yield
        finally:
            stop.set()
    writer.result()


FUZZ_PROMPTS = ("import os\n", "class A:\n", "x = [", "def main(")
PLAIN = ("-np", "2", *ONE_THREAD)


@pytest.fixture(scope="module")
def answers_of_stock(bin_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    with llama_server(bin_dir, tmp_path_factory.mktemp("stock"), *PLAIN, "--no-repack", draft=False) as port:
        return [complete(port, 48, prompt)["content"] for prompt in FUZZ_PROMPTS]


def ask_all_at_once(port: int) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda prompt: complete(port, 48, prompt), FUZZ_PROMPTS * 4))
    assert all(answer["tokens_predicted"] == 48 for answer in answers)


@pytest.mark.parametrize("who", ["scheduler", "anybody"])
def test_nonsense_on_the_board_never_changes_an_answer(
    bin_dir: Path, tmp_path: Path, answers_of_stock: list[str], who: str
) -> None:
    """Whatever another process writes, and wherever: poor decisions at worst; the text is that of stock."""
    name = f"fuzz-{who}-{os.getpid()}"
    arguments = (*PLAIN, "--spac-cache", "25%", "--spac-board", name)
    with llama_server(bin_dir, tmp_path, *arguments, draft=False) as port, Board.open(name) as board:
        arrays = scheduler_arrays(board) if who == "scheduler" else whole_board(board, name)
        with scribbling(board, arrays, seed=1):
            for _ in range(3):
                assert [complete(port, 48, prompt)["content"] for prompt in FUZZ_PROMPTS] == answers_of_stock
            ask_all_at_once(port)
        if who == "scheduler":
            counters = board.counters[0]
            assert counters["n_decisions"] > 0
            assert counters["n_loads"] > 0
            assert counters["n_pinned_steals"] == 0
    board_file.path_of(name).unlink(missing_ok=True)


@pytest.mark.parametrize("who", ["scheduler", "anybody"])
def test_nonsense_on_the_board_never_hurts_drafting(bin_dir: Path, tmp_path: Path, who: str) -> None:
    """Draft-length limits are among it; they change which kernels run, so texts may part at near ties."""
    name = f"fuzz-draft-{who}-{os.getpid()}"
    arguments = (*PLAIN, "--spec-draft-n-max", "4", "--spac-cache", "25%", "--spac-board", name)
    with llama_server(bin_dir, tmp_path, *arguments) as port, Board.open(name) as board:
        arrays = scheduler_arrays(board) if who == "scheduler" else whole_board(board, name)
        with scribbling(board, arrays, seed=2):
            n_before = int(board.n_records[0])
            ask_all_at_once(port)
        if who == "scheduler":
            lengths = board.records["n_draft"][n_before : int(board.n_records[0])]
            assert set(np.unique(lengths)) <= set(range(5))
            assert len(set(lengths.tolist())) > 1  # the limits were read
        board.n_draft_max[:] = -1
        assert complete(port, 16)["timings"]["draft_n"] > 0
    board_file.path_of(name).unlink(missing_ok=True)


def test_a_killed_server_ends_serve_and_leaves_nothing(tmp_path: Path) -> None:
    with Serve(tmp_path) as serve:
        serve.wait_ready()
        port, board = serve.port, serve.board
        os.kill(serve.server_pid, signal.SIGKILL)
        assert serve.wait() == 1
        assert "was killed by SIGKILL" in serve.log()
        assert_nothing_left(serve)
    with Serve(tmp_path, "--port", str(port), "--board", board) as again:
        again.wait_ready()
        assert complete(again.port, 8)["tokens_predicted"] == 8
        assert again.stop() == 0
        assert_nothing_left(again)


def test_a_killed_server_is_started_again_with_restart(tmp_path: Path) -> None:
    with Serve(tmp_path, "--restart") as serve:
        serve.wait_ready()
        os.kill(serve.server_pid, signal.SIGKILL)
        serve.wait_ready(1)
        assert serve.event("server_died") is not None
        assert complete(serve.port, 8)["tokens_predicted"] == 8
        assert serve.stop() == 0
        assert_nothing_left(serve)


def test_servers_that_are_killed_before_anybody_asked_are_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As often as it takes: the supervisor saw none of them healthy, but they were."""
    pids: list[int] = []

    def kill(server: Child) -> bool:
        pids.append(server.pid)
        wait_for("its answer", lambda: is_healthy(HOST, launch.port))
        server.send(signal.SIGKILL)
        assert server.wait(10)
        return False

    monkeypatch.setattr(Supervisor, "_wait_until_healthy", lambda self: kill(self.server))
    monkeypatch.setattr(Backoff, "after", lambda *_: 0.0)
    options = ServeOptions(model=TARGET, device="emulated", passed=ONE_THREAD)
    launch = Launch(port=free_port(), board=f"killed-{os.getpid()}", cache="25%", n_ctx=512)
    signals = Signals()
    supervisor = Supervisor(replace(options, restart=True), launch, signals)
    monkeypatch.setattr(supervisor, "_sleep", lambda _s: signals.received.extend([2] * (len(pids) > 3)))
    assert supervisor.run() == EXIT_INTERRUPTED
    assert len(pids) == FIRST_STARTS + 1


@pytest.mark.skipif(not namespace.is_allowed(), reason="no mount namespaces here")
def test_without_a_device_a_full_shm_is_no_obstacle(tmp_path: Path) -> None:
    """Nothing is to be placed, so nobody needs the board."""
    script = 'mount -t tmpfs -o size=4k tmpfs /dev/shm && exec "$0" "$@"'
    within = (*namespace.unshare(), "sh", "-c", script)
    with Serve(tmp_path, passed=ONE_THREAD, draft=False, device="none", within=within) as serve:
        serve.wait_ready(scheduler=False)
        assert complete(serve.port, 8)["tokens_predicted"] == 8
        assert "going on without it" in serve.log()


@pytest.mark.skipif(not namespace.is_allowed(), reason="no mount namespaces here")
def test_with_a_device_a_full_shm_is_named(tmp_path: Path) -> None:
    within = (*namespace.unshare(), "sh", "-c", 'mount -t tmpfs -o size=4k tmpfs /dev/shm && exec "$0" "$@"')
    with Serve(tmp_path, passed=ONE_THREAD, draft=False, within=within) as serve:
        assert serve.wait() == 1
        assert "free memory there (df /dev/shm)" in serve.log()
        assert "PYSPAC_CACHE is set" not in serve.log()


def test_a_sleeping_server_gets_its_scheduler_back(tmp_path: Path) -> None:
    """llama-server frees its model when idle, and the board with it; the next request brings both back."""
    passed = ("-np", "1", *ONE_THREAD, "--sleep-idle-seconds", "4")
    with Serve(tmp_path, passed=passed) as serve:
        serve.wait_ready()
        wait_for("sleep", lambda: not board_file.path_of(serve.board).exists())
        assert complete(serve.port, 16)["tokens_predicted"] == 16
        # asked on and on, as a busy machine may take longer for a scheduler than the server to sleep again
        wait_for("a new scheduler", lambda: serve.event("attached", 1) or not complete(serve.port, 1))
        assert serve.stop() == 0
        assert_nothing_left(serve)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_signals_end_everything(tmp_path: Path, number: int, code: int) -> None:
    with Serve(tmp_path) as serve:
        serve.wait_ready()
        os.kill(serve.scheduler_pid, signal.SIGSTOP)  # even a stopped child goes
        assert serve.stop(number) == code
        assert_nothing_left(serve)


def test_killed_itself_serve_leaves_no_child(tmp_path: Path) -> None:
    with Serve(tmp_path) as serve:
        serve.wait_ready()
        children = psutil.Process(serve.process.pid).children(recursive=True)
        assert len(children) == 2
        serve.process.kill()
        _gone, alive = psutil.wait_procs(children, timeout=20)
        assert not alive
        assert_nothing_left(serve)


def test_a_board_left_behind_is_taken_over(tmp_path: Path) -> None:
    """Both killed at once: nobody is left to clean up, and the next start with that name works."""
    with Serve(tmp_path) as serve:
        serve.wait_ready()
        os.kill(serve.process.pid, signal.SIGSTOP)
        os.kill(serve.server_pid, signal.SIGKILL)
        serve.process.kill()
        serve.wait()
        board, port = serve.board, serve.port
        assert board_file.path_of(board).exists()
        assert run_pyspac("attach", board, cache_dir=tmp_path).returncode == 1
    with Serve(tmp_path, "--board", board, "--port", str(port)) as again:
        again.wait_ready()
        assert again.stop() == 0
        assert_nothing_left(again)


def test_attach_serves_a_server_started_by_hand(bin_dir: Path, tmp_path: Path) -> None:
    """And ends with it."""
    name = f"hand-{os.getpid()}"
    with llama_server(bin_dir, tmp_path, "--spac-cache", "25%", "--spac-board", name, *ONE_THREAD) as port:
        complete(port, 16)  # the built-in policy decides so far
        argv = [sys.executable, "-m", "pyspac", "attach", name, "--no-warm-start"]
        attached = subprocess.Popen(argv, env=environment(tmp_path), stderr=subprocess.PIPE, text=True)
        assert attached.stderr is not None
        assert "layers x" in attached.stderr.readline()
        with Board.open(name) as board:
            before = int(board.counters["n_decisions"][0])
            complete(port, 64)
            wait_for("decisions", lambda: int(board.counters["n_decisions"][0]) > before)
    assert attached.wait(20) == 0
    assert "its server is gone" in attached.stderr.read()
    attached.stderr.close()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["-m", "missing.gguf"], "no such file"),
        (["-m", str(DRAFT), "--device", "emulated"], "dense model"),
        (["-m", str(TARGET), "--cache", "25%"], "--cache 25% needs a device"),
        (["-m", __file__], "not a GGUF file"),
        (["-m", str(TARGET), "--device", "emulated", "--cache", "0"], "--cache cannot be"),
        (["-m", str(TARGET), "--cache", "lots"], "--cache lots is no size"),
        (["-m", str(TARGET), "--device", "nothing0"], 'no device "nothing0" here'),
        (["-m", str(TARGET), "--board", "a/b"], "board name"),
        (["-m", str(TARGET), "--port", "99999"], "--port"),
        (["-m", str(TARGET), "--metrics-port", "-1"], "--metrics-port"),
        (["-m", str(TARGET), "--predict", "tokens"], "predict cannot be 'tokens': give one or more of token"),
        (["-m", str(TARGET), "--", "--port", "80"], "give --port"),
        ([], "there is no model: give FILE.gguf"),
    ],
)
def test_bad_input_is_refused(tmp_path: Path, arguments: list[str], text: str) -> None:
    done = run_pyspac("serve", *arguments, cache_dir=tmp_path)
    assert done.returncode == 2
    assert text in done.stderr
    assert len(done.stderr.splitlines()) <= 3
    assert not list(tmp_path.iterdir())
