"""The soak's parts, each by itself: books, verdict, and every fault, on files and processes of our own."""

from __future__ import annotations

import json
import os
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from gguf import GGUFReader
from rich.console import Console
from serving import ONE_THREAD, TARGET, Serve, complete

from tools.soak import __main__ as program
from tools.soak import adapters, namespace
from tools.soak.clients import ask_everything
from tools.soak.faults import FAULTS, board, connections, disks, requests, threads
from tools.soak.faults import scheduler as scheduler_faults
from tools.soak.faults.dealer import FaultCount, FaultDealer
from tools.soak.faults.fault import Fault, FaultError, Site
from tools.soak.questions import Answer, Question, adapter_scales, all_questions
from tools.soak.references import MIN_TOKENS, certain_part, margins, n_certain
from tools.soak.report import MIB, Report, summarise_memory
from tools.soak.run import is_scheduler_back
from tools.soak.tally import Tally, ask_and_compare
from tools.system_faults import VARIABLE, SystemFaults, has_compiler, prepare

QUESTION = Question("x = ", is_chat=False, n_tokens=8)
ADAPTED = replace(QUESTION, adapter=1)
ANSWER = Answer("1 + 2\n", "length")
SIZE = 20_000  # of the boards here


# ---- what stands in for a server -----------------------------------------------------------------


class FakeStream:
    """A stream of text, a character per chunk; `reason` ends it."""

    def __init__(self, text: str, reason: str | None) -> None:
        parts = [*((letter, None) for letter in text), ("", reason)]
        self._chunks = iter([SimpleNamespace(choices=[chunk(*part)]) for part in parts])

    def __iter__(self) -> Iterator[Any]:
        return self._chunks

    def __enter__(self) -> FakeStream:
        return self

    def __exit__(self, *_exc: object) -> None:
        pass


def chunk(text: str, reason: str | None) -> SimpleNamespace:
    return SimpleNamespace(text=text, finish_reason=reason)


class FakeAsker:
    """Gives one answer to everything, or raises."""

    n_adapters = 2

    def __init__(self, answer: Answer = ANSWER, error: Exception | None = None) -> None:
        self.answer, self.error = answer, error
        self.asked: list[dict[str, Any]] = []

    def ask(self, _question: Question, **more: Any) -> Answer:
        self.asked.append(more)
        if self.error:
            raise self.error
        return self.answer

    def open(self, _question: Question, **more: Any) -> FakeStream:
        self.asked.append(more)
        if self.error:
            raise self.error
        return FakeStream(self.answer.text, self.answer.finish_reason)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    board = tmp_path / "board"
    board.write_bytes(os.urandom(SIZE))
    slots = tmp_path / "cache" / "slots"
    slots.mkdir(parents=True)
    serve = SimpleNamespace(url="http://127.0.0.1:1", board="soaked", port=1, server_pid=0, scheduler_pid=0)
    references = {QUESTION: ANSWER, ADAPTED: ANSWER, replace(ADAPTED, adapter=0): ANSWER}
    return Site(serve, TARGET, board, FakeAsker(), references, Tally(), n_slots=4, slots_folder=slots)  # type: ignore[arg-type]


@contextmanager
def posts(
    site: Site, monkeypatch: pytest.MonkeyPatch, error: FaultError | None = None
) -> Iterator[list[Any]]:
    """What a fault POSTs; each is refused with `error`, if there is one."""
    seen: list[Any] = []

    def post(_site: Site, path: str, body: Any) -> Any:
        seen.append((path, body))
        if error:
            raise error
        return {}

    monkeypatch.setattr(Site, "post", post)
    yield seen


# ---- questions and books -------------------------------------------------------------------------


def place(*logprobs: float) -> dict[str, Any]:
    return {"top_logprobs": [{"logprob": value} for value in logprobs]}


def test_an_answer_is_certain_up_to_its_first_close_choice() -> None:
    choice = SimpleNamespace(logprobs=SimpleNamespace(content=[place(-0.1, -2.1), place(-1.5, -1.0)]))
    assert margins(choice) == pytest.approx([2.0, 0.5])
    assert n_certain([2.0, 0.5, 0.01, 3.0], least=0.05) == 2
    assert n_certain([2.0, 0.5], least=0.05) == 2


@pytest.mark.parametrize(("n_clear", "n_asked"), [(MIN_TOKENS - 1, None), (MIN_TOKENS, MIN_TOKENS), (20, 20)])
def test_questions_ask_only_for_what_is_certain(n_clear: int, n_asked: int | None) -> None:
    content = [*[place(-0.1, -3.0)] * n_clear, place(-0.7, -0.7001), place(-0.1, -3.0)]
    choice = SimpleNamespace(logprobs=SimpleNamespace(content=content))
    asker = SimpleNamespace(open=lambda _question, **_more: SimpleNamespace(choices=[choice]))
    part = certain_part(asker, replace(QUESTION, n_tokens=64))  # type: ignore[arg-type]
    assert (part and part.n_tokens) == n_asked


def test_questions_are_the_seeds_alone() -> None:
    assert all_questions(2, 7) == all_questions(2, 7)
    assert {question.adapter for question in all_questions(2, 7)} == {None, 0, 1}
    assert adapter_scales(1, 2) == [{"id": 0, "scale": 0.0}, {"id": 1, "scale": 1.0}]
    assert adapter_scales(None, 2) == [{"id": 0, "scale": 0.0}, {"id": 1, "scale": 0.0}]


@pytest.mark.parametrize(
    ("asker", "field"),
    [
        (FakeAsker(), "n_complete"),
        (FakeAsker(Answer("1 + 3\n", "length")), "n_different"),
        (FakeAsker(Answer(ANSWER.text, "stop")), "n_different"),
        (FakeAsker(Answer(ANSWER.text, None)), "n_lost"),
        (FakeAsker(error=ConnectionError("gone")), "n_lost"),
    ],
)
def test_every_answer_is_booked_once(asker: FakeAsker, field: str) -> None:
    tally = Tally()
    ask_and_compare(asker, QUESTION, ANSWER, tally, is_streamed=True)  # type: ignore[arg-type]
    assert tally.n_asked == getattr(tally, field) == 1
    assert tally.is_balanced
    assert bool(tally.examples) == (field != "n_complete")


def test_everything_is_asked_whole_and_streamed() -> None:
    tally, asker = Tally(), FakeAsker()
    ask_everything(asker, {QUESTION: ANSWER, ADAPTED: ANSWER}, tally, n_clients=3)  # type: ignore[arg-type]
    assert tally.n_complete == 4
    assert sorted(more["is_streamed"] for more in asker.asked) == [False, False, True, True]


# ---- the verdict ---------------------------------------------------------------------------------


def report(**fields: Any) -> Report:
    """One that passed, but for `fields`."""
    tally = Tally(n_asked=3, n_complete=2, n_cut=1)
    base: dict[str, Any] = {"seed": 0, "max_growth_percent": 1.0, "tally": tally, "faults": {}}
    return Report(**{**base, "fault_failures": [], **fields})


def samples(seconds: int, last_mib: float) -> list[tuple[float, int]]:
    """From 100 MiB to `last_mib` in a straight line, one per second."""
    return [(s, int((100 + (last_mib - 100) * s / seconds) * MIB)) for s in range(seconds + 1)]


def test_memory_is_compared_between_the_ends() -> None:
    # by hand: of 1,001 samples, the 26th lowest of the first and the last 250 are 0.25 and 7.76 above 100 MiB
    memory = summarise_memory(samples(1000, 110.0))
    assert memory is not None
    assert memory.start_mib == pytest.approx(100.25, abs=0.01)
    assert memory.end_mib == pytest.approx(107.76, abs=0.01)
    assert memory.mib_per_hour == pytest.approx(36.0, rel=0.01)
    assert summarise_memory([(0.0, MIB)]) is None


def test_memory_that_a_fault_holds_for_a_while_is_no_growth() -> None:
    held = [(s, (110 if s % 300 >= 200 else 100) * MIB) for s in range(1200)]
    memory = summarise_memory(held)
    assert memory is not None
    assert memory.growth_percent == 0.0


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"tally": Tally(n_asked=2, n_complete=1, n_lost=1)}, "1 answers lost"),
        ({"tally": Tally(n_asked=2, n_complete=1, n_different=1)}, "1 answers different"),
        ({"tally": Tally(n_asked=3, n_complete=2)}, "do not agree"),
        ({"tally": Tally(n_asked=1, n_cut=1)}, "no answer was complete"),
        ({"fault_failures": ["twin: it ran"]}, "1 faults"),
        ({"troubles": ["the server died"]}, "the server died"),
        ({"memory": summarise_memory(samples(1000, 110.0))}, "memory grew by 7.49 %"),
        ({"memory": summarise_memory(samples(1000, 100.5))}, None),
        ({"memory": summarise_memory(samples(100, 110.0))}, None),  # too short to be judged
        ({"memory": summarise_memory(samples(1000, 90.0))}, None),
    ],
)
def test_what_fails_a_soak(fields: dict[str, Any], reason: str | None) -> None:
    seen = report(**fields)
    reasons = seen.why_failed()
    assert len(reasons) == (reason is not None)
    assert reason is None or reason in reasons[0]
    assert seen.to_dict()["passed"] == (reason is None)


def test_the_report_has_every_count() -> None:
    faults = {"kill": FaultCount(n_applied=5, n_idle=1), "shm-full": FaultCount(skipped="not allowed")}
    seen = report(faults=faults, memory=summarise_memory(samples(100, 101.0)), n_scheduler_restarts=4)
    seen.tally.examples.append("lost: [red]x")
    console = Console(file=StringIO(), width=160)
    seen.print(console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for part in (
        "3 asked",
        "2 complete",
        "1 cut off",
        "SKIPPED: not allowed",
        "4 times",
        "too short",
        "[red]x",
    ):
        assert part in text
    again = json.loads(json.dumps(seen.to_dict()))
    assert again["faults"]["kill"]["n_applied"] == 5
    assert again["answers"]["cut_on_purpose"] == 1


# ---- the faults ----------------------------------------------------------------------------------


@pytest.fixture
def scheduler(site: Site) -> Iterator[psutil.Process]:
    """A process that waits, as the scheduler."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    site.serve.scheduler_pid = process.pid
    try:
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


def test_kill(site: Site, scheduler: psutil.Process, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = scheduler_faults.Kill(site, 0)
    monkeypatch.setattr(scheduler_faults, "SPARED", 1.0)
    assert not fault.apply()  # too young
    assert scheduler.is_running()
    monkeypatch.setattr(scheduler_faults, "LONG_LIFE_S", 0.0)
    assert fault.apply()
    scheduler.wait(10)
    assert not fault.apply()  # gone


def test_stop_lets_it_go_on(site: Site, scheduler: psutil.Process, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def look(_site: Site, _seconds: float) -> None:
        end_s = time.monotonic() + 10
        while scheduler.status() != psutil.STATUS_STOPPED and time.monotonic() < end_s:
            time.sleep(0.001)
        seen.append(scheduler.status())

    monkeypatch.setattr(Site, "wait", look)
    assert scheduler_faults.Stop(site, 0).apply()
    assert seen == [psutil.STATUS_STOPPED]
    assert scheduler.status() != psutil.STATUS_STOPPED


def test_scribble_puts_back_what_was_there(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    before = site.board_path.read_bytes()
    written: list[int] = []
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: written.append(at) or write(fd, data, at))
    assert board.Scribble(site, 0).apply()
    assert len(written) > 2
    assert site.board_path.read_bytes() == before
    site.board_path.unlink()
    assert not board.Scribble(site, 0).apply()


@contextmanager
def mending(path: Path) -> Iterator[None]:
    """An engine that restores the size of its board."""
    stop = threading.Event()

    def mend() -> None:
        while not stop.wait(0.002):
            os.truncate(path, SIZE)

    thread = threading.Thread(target=mend)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_truncate_waits_until_the_engine_has_mended_it(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = board.Truncate(site, 0)
    with mending(site.board_path):
        assert fault.apply()
    assert site.board_path.stat().st_size == SIZE
    monkeypatch.setattr(board, "REPAIR_S", 0.05)
    with pytest.raises(FaultError, match="of 20000 bytes"):
        fault.apply()
    site.board_path.unlink()
    assert not fault.apply()


def test_truncated_sizes_and_nonsense(site: Site) -> None:
    rng = board.Truncate(site, 0).rng
    sizes = {board.truncated_size(rng, SIZE) for _ in range(300)}
    assert {0, 1, 4095, 4096, SIZE - 1} <= sizes
    assert max(sizes) < SIZE
    assert all(board.truncated_size(rng, 10) < 10 for _ in range(50))
    assert all(len(board.nonsense(rng, n)) == n for n in (0, 1, 64) for _ in range(9))


def test_remove_brings_the_same_board_back(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    path, inode, seen = site.board_path, site.board_path.stat().st_ino, []
    monkeypatch.setattr(Site, "wait", lambda _site, _seconds: seen.append(path.exists()))
    fault = board.Remove(site, 0)
    assert fault.apply()
    assert seen == [False]
    assert path.stat().st_ino == inode
    monkeypatch.setattr(Site, "wait", lambda _site, _seconds: path.write_bytes(b"another"))
    with pytest.raises(FaultError, match="made again by somebody"):
        fault.apply()
    assert sorted(path.parent.glob("soak-kept*")) == []


def test_remove_for_good(site: Site, scheduler: psutil.Process) -> None:
    board.Remove(site, 0).for_good()
    scheduler.wait(10)
    assert not site.board_path.exists()
    assert not board.Remove(site, 0).apply()


@pytest.mark.parametrize(
    ("code", "stderr", "text"),
    [
        (2, "8080 is in use", None),
        (0, "", "ended with 0"),
        (2, "no such file", "ended with 2"),
        (1, "in use", "1"),
    ],
)
def test_a_twin_must_be_refused(
    site: Site, monkeypatch: pytest.MonkeyPatch, code: int, stderr: str, text: str | None
) -> None:
    done = subprocess.CompletedProcess([], code, "", stderr)
    monkeypatch.setattr(board, "run_pyspac", lambda *_arguments, **_more: done)
    fault = board.Twin(site, 0)
    if text is None:
        assert fault.apply()
    else:
        with pytest.raises(FaultError, match=text):
            fault.apply()


def test_a_twin_must_leave_the_board(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def take(*_arguments: str, **_more: Any) -> subprocess.CompletedProcess[str]:
        site.board_path.rename(site.board_path.with_name("old"))
        site.board_path.write_bytes(b"its own")
        return subprocess.CompletedProcess([], 2, "", "in use")

    monkeypatch.setattr(board, "run_pyspac", take)
    with pytest.raises(FaultError, match="took the board"):
        board.Twin(site, 0).apply()


def test_disconnect_looks_at_what_came_before(site: Site) -> None:
    fault, tally = requests.Disconnect(site, 0), site.tally
    for _ in range(8):
        assert fault.apply()
    assert tally.n_asked == tally.n_cut > 8
    site.asker = FakeAsker(Answer("something else", "length"))  # type: ignore[assignment]
    for _ in range(8):
        fault.apply()
    assert tally.n_different > 0
    site.asker = FakeAsker(error=ConnectionError("gone"))  # type: ignore[assignment]
    for _ in range(8):
        fault.apply()
    assert tally.n_lost > 0
    assert tally.is_balanced


@contextmanager
def listening(site: Site, answer: bytes) -> Iterator[list[bytes]]:
    """A server that gives each connection a thread; a whole request gets `answer`, unless that is empty."""
    begun: list[bytes] = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            begun.append(line := self.rfile.readline())
            if line.endswith(b"\n") and answer:
                self.wfile.write(answer)
            elif line.endswith(b"\n"):
                self.rfile.read()

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads, request_queue_size = True, 256

    with Server(("127.0.0.1", 0), Handler) as server:
        site.serve.port = server.server_address[1]
        site.serve.url = f"http://127.0.0.1:{site.serve.port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield begun
        server.shutdown()


def test_half_open_connections_keep_nobody_waiting(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Site, "wait", lambda _site, _seconds: None)
    with listening(site, b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}") as begun:
        assert connections.HalfOpen(site, 0).apply()
    assert len(begun) > 4
    assert b"GET /health HTTP/1.1\r\n" in begun
    monkeypatch.setattr(connections, "ANSWER_S", 0.2)
    with listening(site, b""), pytest.raises(FaultError, match="/health did not answer within 0 s"):
        connections.HalfOpen(site, 0).apply()
    with pytest.raises(FaultError, match="a connection was refused"):  # nobody listens any more
        connections.HalfOpen(site, 0).apply()


@pytest.mark.skipif(not has_compiler(), reason="no C compiler")
def test_threads_run_out_of_a_real_server(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where those of earlier connections are still there; and others are answered afterwards."""
    variables = prepare(tmp_path)
    site.system = SystemFaults(Path(variables[VARIABLE]))
    monkeypatch.setattr(Site, "wait", lambda _site, _seconds: None)
    with Serve(tmp_path, passed=ONE_THREAD, draft=False, variables=variables) as serve:
        site.serve = serve.wait_ready()  # type: ignore[assignment]
        assert connections.HalfOpen(site, 0).apply()
        assert threads.NoThreads(site, 0).apply()
        assert complete(serve.port, 4)["tokens_predicted"] == 4


def test_threads_run_out_for_a_while(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = threads.NoThreads(site, 0)
    assert "no C compiler" in str(fault.why_not())
    words = site.slots_folder / "words"
    words.write_bytes(bytes(64))
    site.system = SystemFaults(words)
    assert fault.why_not() is None
    seen: list[int] = []

    def want(_site: Site, _seconds: float) -> None:
        seen.append(SystemFaults(words).get("thread_every"))
        SystemFaults(words).set(n_no_threads=len(seen) // 2)

    monkeypatch.setattr(Site, "wait", want)
    assert not fault.apply()  # nobody wanted one
    assert fault.apply()
    assert set(seen) <= {1, 2, 3}
    assert site.system.get("thread_every") == 0


def test_slots_of_adapters_are_left_alone(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("slot-1", "slot-1.dft"):
        (site.slots_folder / name).touch()
    with posts(site, monkeypatch) as seen:
        for _ in range(40):
            requests.Slots(site, len(seen)).apply()
    paths = {path for path, _ in seen}
    assert paths == {f"/slots/{slot}?action={a}" for slot in range(3) for a in ("save", "restore", "erase")}
    restored = {body["filename"] for path, body in seen if "restore" in path}
    assert restored == {"slot-1"}


def test_slots_may_fail_only_while_the_disk_is_full(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    half = site.slots_folder / "slot-1"
    with posts(site, monkeypatch, FaultError("500 Unable to save slot")):
        with pytest.raises(FaultError, match="Unable to save"):
            requests.Slots(site, 0).apply()
        site.is_disk_full = True
        for seed in range(40):
            half.touch()
            assert requests.Slots(site, seed).apply()
            if not half.exists():
                break
    assert not half.exists()  # a file saved meanwhile may be half of one


def test_adapters_are_swapped_back(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    with posts(site, monkeypatch) as seen:
        assert requests.Adapters(site, 0).apply()
    scales = [[entry["scale"] for entry in body] for _path, body in seen]
    assert sorted(scales[::2]) == [[0.0, 1.0], [1.0, 0.0]]
    assert scales[1::2] == [[0.0, 0.0]] * 2
    assert site.tally.n_complete == 2
    assert all(more["names_adapter"] is False for more in site.asker.asked)  # type: ignore[attr-defined]


def test_full_file_systems_are_our_own_or_none(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (disks.FullShm, disks.FullDisk):
        assert "not allowed here" in str(kind(site, 0).why_not())
    site.shm_folder = site.disk_folder = site.slots_folder
    seen: list[tuple[bool, list[Path]]] = []

    def look(_site: Site, _seconds: float) -> None:
        seen.append((site.is_disk_full, list(site.slots_folder.iterdir())))

    monkeypatch.setattr(disks, "fill", Path.touch)
    monkeypatch.setattr(Site, "wait", look)
    for kind in (disks.FullShm, disks.FullDisk):
        fault = kind(site, 0)
        assert fault.why_not() is None
        assert fault.apply()
    assert [(is_full, len(files)) for is_full, files in seen] == [(False, 1), (True, 1)]
    assert not list(site.slots_folder.iterdir())
    assert not site.is_disk_full


def test_filling_ends() -> None:
    disks.fill(Path("/dev/full"))


# ---- dealing them --------------------------------------------------------------------------------


class Noting(Fault):
    """Writes down when it begins and ends."""

    what = "nothing"

    def __init__(self, name: str, resource: str, notes: list[tuple[str, str]]) -> None:
        self.name, self.resource, self.notes = name, resource, notes  # type: ignore[misc]

    def apply(self) -> bool:
        self.notes.append(("begin", self.name))
        time.sleep(0.001)
        self.notes.append(("end", self.name))
        return True


def deal(faults: list[Fault], n_dealers: int, until: int) -> FaultDealer:
    """Deal them until so many were applied."""
    stop = threading.Event()
    dealer = FaultDealer(faults, stop, n=n_dealers, pause_s=0.0005, seed=0)
    dealer.start()
    end_s = time.monotonic() + 60
    while sum(count.n_applied + count.n_failed for count in dealer.counts.values()) < until:
        assert time.monotonic() < end_s
        time.sleep(0.001)
    stop.set()
    dealer.join()
    return dealer


def test_each_fault_comes_once_before_any_comes_again() -> None:
    notes: list[tuple[str, str]] = []
    deal([Noting(name, name, notes) for name in "abcde"], 1, until=15)
    begun = [name for what, name in notes if what == "begin"]
    for start in (0, 5, 10):
        assert sorted(begun[start : start + 5]) == list("abcde")


def test_faults_of_one_resource_never_overlap() -> None:
    notes: list[tuple[str, str]] = []
    deal([Noting(name, "board", notes) for name in "abcd"], 4, until=40)
    assert [what for what, _ in notes] == ["begin", "end"] * (len(notes) // 2)


def test_a_fault_that_breaks_is_a_failure() -> None:
    class Breaking(Noting):
        def apply(self) -> bool:
            raise FaultError("the board is gone") if self.name == "a" else ValueError(self.name)

    class Skipped(Noting):
        def why_not(self) -> str:
            return "not here"

    dealer = deal([Breaking("a", "a", []), Breaking("b", "b", []), Skipped("c", "c", [])], 1, until=2)
    assert {"a: the board is gone", "b: ValueError: b"} <= set(dealer.failures)
    assert dealer.counts["c"] == FaultCount(skipped="not here")


# ---- the program ---------------------------------------------------------------------------------


def test_names_of_faults() -> None:
    every = [fault.name for fault in FAULTS]
    assert program.parse_arguments([]).faults == every
    assert program.parse_arguments(["--faults", "twin,kill"]).faults == ["twin", "kill"]
    assert program.parse_arguments(["--without", "kill,twin"]).faults == [
        n for n in every if n not in ("kill", "twin")
    ]
    for bad in (["--faults", "flood"], ["--minutes", "0"], ["--minutes", "nan"], ["--clients", "0"]):
        with pytest.raises(SystemExit) as exit_:
            program.parse_arguments(bad)
        assert exit_.value.code == 2


def test_another_model_has_no_draft_model_unless_it_is_named() -> None:
    assert program.parse_arguments([]).draft == program.DRAFT
    assert program.parse_arguments(["--model", "other.gguf"]).draft is None
    assert program.parse_arguments(["--model", "other.gguf", "--draft", "its.gguf"]).draft == Path("its.gguf")


def test_help_says_what_each_fault_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.parse_arguments(["--help"])
    text = capsys.readouterr().out
    for fault in FAULTS:
        assert fault.what in text


def test_a_scheduler_is_back_when_the_last_one_has_decided(site: Site, scheduler: psutil.Process) -> None:
    def events(*names: str) -> Any:
        return SimpleNamespace(events=[{"event": name} for name in names])

    assert scheduler.is_running()
    assert is_scheduler_back(events("scheduler_started", "attached"), site)
    assert not is_scheduler_back(events("scheduler_started", "attached", "scheduler_started"), site)
    died_early = events("scheduler_started", "scheduler_died", "scheduler_started", "attached")
    assert is_scheduler_back(died_early, site)
    assert not is_scheduler_back(events(), site)


def test_adapters_fit_the_model(tmp_path: Path) -> None:
    attention, experts = adapters.write_adapters(tmp_path, TARGET)
    shapes = {tensor.name: tuple(map(int, tensor.shape)) for tensor in GGUFReader(TARGET).tensors}
    for path, part in ((attention, "attn_q"), (experts, "ffn_up_exps")):
        tensors = {tensor.name: tuple(map(int, tensor.shape)) for tensor in GGUFReader(path).tensors}
        assert any(part in name for name in tensors)
        for name, shape in tensors.items():
            n_in, n_out, *n_expert = shapes[name.rpartition(".lora_")[0]]
            rank = adapters.RANK
            assert shape == ((n_in, rank, *n_expert) if name.endswith("_a") else (rank, n_out, *n_expert))
    with pytest.raises(ValueError, match="has no tensor"):
        adapters.write_adapter(tmp_path / "none.gguf", TARGET, adapters.re.compile("nothing"), 0)


def test_small_file_systems_only_in_a_namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYSPAC_SOAK_NAMESPACE", raising=False)
    with namespace.mounted(tmp_path, 1) as folder:
        assert folder is None
    monkeypatch.setattr(
        subprocess, "run", lambda *_a, **_k: (_ for _ in ()).throw(FileNotFoundError("unshare"))
    )
    assert not namespace.is_allowed()
    namespace.enter(["nothing"])  # returns
