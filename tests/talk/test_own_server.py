"""A llama-server of a command's own: where it is, and that nothing of it stays, whoever is killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from serving import TARGET, environment, has_ended, wait_for

from pyspac.commands.server_options import own_options
from pyspac.errors import ModelError
from pyspac.server import board_file
from pyspac.talk import own_server
from pyspac.talk.interrupt import Interrupt
from pyspac.talk.own_server import PREFIX, OwnServer, private_folder
from tools.soak import namespace

END_S = 30.0
WITHOUT_END = ("--context-shift", "--temp", "2", "--ignore-eos")  # an answer that goes on for ever


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the folders of this test's commands are; its path is short, as a socket's is."""
    with tempfile.TemporaryDirectory(prefix="place-") as folder:
        path = Path(folder) / "t"
        path.mkdir()
        monkeypatch.setenv("TMPDIR", str(path))
        monkeypatch.setattr("tempfile.tempdir", None)  # it is asked for once
        yield path


class Command:
    """One `pyspac run`, and the llama-server that it has started."""

    def __init__(self, place: Path, *arguments: str, model: Path = TARGET) -> None:
        argv = [sys.executable, "-m", "pyspac", "run", "-m", str(model), "-p", "import os", "-t", "1"]
        self.place = place
        self.out = place.parent / f"out-{len(list(place.parent.iterdir()))}"
        with self.out.open("wb") as out:
            self.process = subprocess.Popen(
                [*argv, *arguments],
                env=environment(place.parent) | {"TMPDIR": str(place)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.PIPE,
                text=True,
            )
        self._server: psutil.Process | None = None

    @property
    def server(self) -> psutil.Process:
        """As soon as it runs; the first of this name only lists what it was given."""

        def find() -> psutil.Process | None:
            for child in psutil.Process(self.process.pid).children():
                with suppress(psutil.NoSuchProcess):
                    if "--spac-board" in child.cmdline() and "--version" not in child.cmdline():
                        return child
            return None

        if self._server is None:
            self._server = wait_for("a llama-server", find)
        return self._server

    @property
    def board(self) -> Path:
        arguments = self.server.cmdline()
        return board_file.path_of(arguments[arguments.index("--spac-board") + 1])

    def wait_for_text(self) -> None:
        """Until it answers."""
        wait_for("text", lambda: self.out.stat().st_size > 20)

    def end(self) -> tuple[int, str]:
        """Exit code and stderr, after it has ended by itself."""
        _, said = self.process.communicate(timeout=END_S)
        return self.process.returncode, said

    def assert_nothing_left(self, board: Path) -> None:
        pid = self.server.pid
        wait_for("the end of llama-server", lambda: has_ended(pid), END_S)
        assert list(self.place.iterdir()) == []
        assert not board.exists()

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_exc: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()  # with all that it has started
            self.process.communicate(timeout=END_S)


@contextmanager
def command(place: Path, *arguments: str, model: Path = TARGET) -> Iterator[Command]:
    with Command(place, *arguments, model=model) as started:
        yield started


def test_its_folder_is_private_and_goes(place: Path) -> None:
    options = own_options({"model": TARGET, "device": "none"}, ["-t", "1"])
    with OwnServer(options) as own:
        [folder] = place.iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
        assert (folder / "server.sock").is_socket()
        assert own.client.get("/health") == {"status": "ok"}
        pid, board = own.server.pid, board_file.path_of(own.launch.board)
        assert board.exists()
    assert has_ended(pid)
    assert list(place.iterdir()) == []
    assert not board.exists()


def test_a_folder_for_temporary_files_that_no_address_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama-server takes a comma in --host for two addresses."""
    (tmp_path / "a,b").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "a,b"))
    with private_folder() as folder:
        assert "," not in str(folder)


@pytest.mark.skipif(not namespace.is_allowed(), reason="no mount namespaces here")
@pytest.mark.parametrize("drafter", [(), ("--spec-type", "ngram")])
def test_a_full_shm_is_no_obstacle_without_a_device(drafter: tuple[str, ...], place: Path) -> None:
    script = 'mount -t tmpfs -o size=4k tmpfs /dev/shm && exec "$0" "$@"'
    argv = [sys.executable, "-m", "pyspac", "run", "-m", str(TARGET), "-p", "import os", "-t", "1", "-n", "4"]
    done = subprocess.run(
        [*namespace.unshare(), "sh", "-c", script, *argv, *drafter, "--device", "none", "--json", "-"],
        env=environment(place.parent) | {"TMPDIR": str(place)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["n_tokens"] == 4


def test_a_command_leaves_nothing_behind(place: Path) -> None:
    with command(place, "-n", "4") as run:
        board = run.board
        code, said = run.end()
        assert code == 0, said
        run.assert_nothing_left(board)


def test_ctrl_c_while_loading(place: Path) -> None:
    """And where llama-server hangs."""
    with command(place, *WITHOUT_END) as run:
        server, board = run.server, run.board
        server.send_signal(signal.SIGSTOP)
        run.process.send_signal(signal.SIGINT)
        assert run.end() == (130, "pyspac: interrupted\n")
        run.assert_nothing_left(board)
        assert run.out.read_text() == ""


def test_ctrl_c_while_answering(place: Path) -> None:
    """What was answered so far is printed, and the table."""
    with command(place, *WITHOUT_END) as run:
        board = run.board
        run.wait_for_text()
        run.process.send_signal(signal.SIGINT)
        code, said = run.end()
        assert code == 130, said
        assert "stopped: interrupted" in said
        assert len(run.out.read_text()) > 20
        assert run.out.read_text().endswith("\n")
        run.assert_nothing_left(board)


@pytest.mark.usefixtures("hears_hangup")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("answers", [False, True])
def test_a_signal_ends_it_all(number: signal.Signals, answers: bool, place: Path) -> None:
    with command(place, *WITHOUT_END) as run:
        board = run.board
        if answers:
            run.wait_for_text()
        run.process.send_signal(number)
        code, said = run.end()
        assert code == 128 + number
        assert "Traceback" not in said
        run.assert_nothing_left(board)


@pytest.mark.parametrize("answers", [False, True])
def test_a_killed_command(answers: bool, place: Path) -> None:
    """The server ends with it; its folder and its board go at once."""
    with command(place, *WITHOUT_END) as run:
        pid, board = run.server.pid, run.board
        if answers:
            run.wait_for_text()
            assert board.exists()
        run.process.kill()
        run.process.wait()
        wait_for("the end of llama-server", lambda: has_ended(pid), END_S)
        wait_for("an empty place", lambda: not list(place.iterdir()) and not board.exists(), END_S)
    assert not board.exists()


def test_a_killed_command_whose_remover_is_killed_too(place: Path) -> None:
    """Its folder and its board go when another command starts."""
    with command(place, *WITHOUT_END) as run:
        pid, board = run.server.pid, run.board
        run.wait_for_text()
        for child in psutil.Process(run.process.pid).children():
            if child.pid != pid:
                child.kill()
        run.process.kill()
        run.process.wait()
        wait_for("the end of llama-server", lambda: has_ended(pid), END_S)
        name = board.name.removeprefix(board_file.PREFIX)  # its threads end one by one
        wait_for("its lock", lambda: not (found := board_file.look_at(name)) or not found.is_alive, END_S)
        [left] = place.iterdir()
        assert board.exists()
        with private_folder() as folder:
            assert list(place.iterdir()) == [folder]
            assert folder != left
            assert not board.exists()
    assert list(place.iterdir()) == []


def test_a_killed_server_is_an_error_that_says_so(place: Path) -> None:
    with command(place, *WITHOUT_END) as run:
        server, board = run.server, run.board
        run.wait_for_text()
        server.kill()
        code, said = run.end()
        assert code == 1
        assert f"pyspac: error: llama-server (process {server.pid}) was killed by SIGKILL" in said
        assert "Traceback" not in said
        assert len(run.out.read_text()) > 20
        run.assert_nothing_left(board)


def test_two_commands_at_once(place: Path) -> None:
    with command(place, *WITHOUT_END) as first, command(place, *WITHOUT_END) as second:
        for run in (first, second):
            run.wait_for_text()
        assert len(list(place.iterdir())) == 2
        assert first.board != second.board
        first.process.send_signal(signal.SIGINT)
        assert first.end()[0] == 130
        assert len(list(place.iterdir())) == 1
        size = second.out.stat().st_size
        wait_for("more of the second's text", lambda: second.out.stat().st_size > size)


def test_what_a_living_command_has_stays(place: Path) -> None:
    with private_folder() as first:
        (first / "server.sock").touch()
        with private_folder() as second:
            assert {*place.iterdir()} == {first, second}
        assert [*first.iterdir()]
    (place / f"{PREFIX}dead").mkdir()
    (place / f"{PREFIX}dead" / "lock").touch()
    (place / f"{PREFIX}begun").mkdir()  # it has no lock yet
    (place / "others").mkdir()
    with private_folder() as folder:
        assert {path.name for path in place.iterdir()} == {folder.name, f"{PREFIX}begun", "others"}


def test_a_folder_that_was_taken_for_left_is_made_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another command looks between the making of the lock and its taking."""
    flock: Callable[[object, int], None] = own_server.fcntl.flock
    seen: list[Path] = []

    def late(lock: object, operation: int) -> None:
        if not seen:
            seen.extend(place.iterdir())
            monkeypatch.setattr(own_server.fcntl, "flock", flock)
            own_server._remove_stale()
        flock(lock, operation)

    monkeypatch.setattr(own_server.fcntl, "flock", late)
    with private_folder() as folder:
        assert [folder] == list(place.iterdir())
        assert folder not in seen


def test_a_model_that_cannot_be_loaded_says_why(place: Path, tmp_path: Path) -> None:
    """Its header is whole: only llama-server finds out."""
    data = TARGET.read_bytes()
    assert data.count(b"blk.0.attn_q.weight") == 1
    model = tmp_path / "broken.gguf"
    model.write_bytes(data.replace(b"blk.0.attn_q.weight", b"blk.0.attn_x.weight"))
    with pytest.raises(ModelError, match=r"exited with code 1 while it loaded the model\n") as broken:
        OwnServer(own_options({"model": model, "device": "none"}, ["-t", "1"]))
    assert "tensor 'blk.0.attn_q.weight' not found" in str(broken.value)
    assert list(place.iterdir()) == []


def test_loading_is_told_in_bytes(place: Path) -> None:
    told: list[tuple[int, int]] = []
    options = own_options({"model": TARGET, "device": "none"}, ["-t", "1"])
    with OwnServer(options, on_progress=lambda n_bytes, total: told.append((n_bytes, total))) as own:
        total = own.launch.model_bytes
    assert 0 < total < TARGET.stat().st_size
    assert {t for _, t in told} == {total}
    assert told[-1] == (total, total)
    assert all(0 <= n_bytes <= total for n_bytes, _ in told)


def test_ctrl_c_before_it_begins(place: Path) -> None:
    interrupt = Interrupt()
    interrupt.is_set = True
    before = psutil.Process().children()  # of other tests: multiprocessing's resource tracker
    with pytest.raises(KeyboardInterrupt):
        OwnServer(own_options({"model": TARGET, "device": "none"}, ["-t", "1"]), interrupt)
    assert list(place.iterdir()) == []
    assert psutil.Process().children() == before
