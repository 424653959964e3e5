"""packaging/replicas/: two servers behind HAProxy. Requests stay where their prompts are known, none is lost.

HAProxy is a program of the system (Debian: haproxy); without it the tests are skipped.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from serving import HOST, JSON_HEADER, ONE_THREAD, ROOT, Serve, complete, free_port, wait_for

REPLICAS = ROOT / "packaging" / "replicas"
PORTS = {"router": 8000, "replica1": 8081, "replica2": 8082, "status": 8405}  # as haproxy.cfg has them
METRICS_PORTS = {"replica1": 9101, "replica2": 9102}  # of the schedulers, as prometheus.yml has them
N_REQUESTS = 200
N_CLIENTS = 4
N_PREDICT = 8
PROMPTS = [f"def parse_{name}(" for name in "abcdefghijklmnopqrst"]

pytestmark = [
    pytest.mark.skipif(shutil.which("haproxy") is None, reason="no haproxy installed"),
    pytest.mark.slow,
]


class Setting:
    """Two replicas and the router, on free ports of this machine, from the files that are shipped."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.stack = stack
        self.ports = {name: free_port() for name in PORTS}
        self.metrics_ports = {name: free_port() for name in METRICS_PORTS}
        self.replicas = {name: self.start(name) for name in ("replica1", "replica2")}
        for replica in self.replicas.values():
            replica.wait_ready()
        stack.enter_context(self._router())
        wait_for("the router", lambda: self.states() == {"replica1": "UP", "replica2": "UP"})

    def start(self, name: str) -> Serve:
        """All with one cache folder, so that they share what they learn."""
        passed = ("-np", "2", *ONE_THREAD)
        ports = ("--port", str(self.ports[name]), "--metrics-port", str(self.metrics_ports[name]))
        serve = Serve(self.folder, *ports, passed=passed, draft=False)
        return self.stack.enter_context(serve)

    def _start_router(self) -> subprocess.Popen[bytes] | None:
        """None: one of its ports was taken meanwhile."""
        self.ports |= {name: free_port() for name in ("router", "status")}
        text = (REPLICAS / "haproxy.cfg").read_text()
        for name, port in PORTS.items():
            text, n = re.subn(rf"127\.0\.0\.1:{port}\b", f"{HOST}:{self.ports[name]}", text)
            assert n == 1, name
        config = self.folder / "haproxy.cfg"
        config.write_text(text)
        with (self.folder / "haproxy.log").open("wb") as log:
            process = subprocess.Popen(
                ["haproxy", "-db", "-f", str(config)], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.stack.callback(process.kill)
        wait_for("the router", lambda: process.poll() is not None or self._rows())
        return process if process.poll() is None else None

    @contextmanager
    def _router(self) -> Iterator[None]:
        process = next(filter(None, (self._start_router() for _ in range(3))), None)
        assert process, (self.folder / "haproxy.log").read_text()
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)

    @property
    def status_url(self) -> str:
        return f"http://{HOST}:{self.ports['status']}/stats"

    def states(self) -> dict[str, str]:
        """What the router thinks of each replica: UP, DOWN, ..."""
        return {row["svname"]: row["status"].split()[0] for row in self._rows() if row["svname"] in PORTS}

    def count(self, field: str) -> int:
        """A sum over all replicas of a column of HAProxy's statistics."""
        return sum(int(row[field] or 0) for row in self._rows() if row["svname"] in PORTS)

    def _rows(self) -> list[dict[str, str]]:
        try:
            with urllib.request.urlopen(f"{self.status_url};csv", timeout=10) as response:
                lines = response.read().decode().lstrip("# ").splitlines()
        except OSError:
            return []
        names = lines[0].split(",")
        return [dict(zip(names, line.split(","), strict=False)) for line in lines[1:]]

    def ask(self, path: str, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """By way of the router: which replica answered, and what. Raises URLError where none did."""
        url = f"http://{HOST}:{self.ports['router']}{path}"
        request = urllib.request.Request(url, json.dumps(body).encode(), JSON_HEADER)
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.headers["X-Replica"], json.load(response)

    def place_of(self, prompt: str) -> str:
        """Which replica this prompt comes to, whatever it says."""
        try:
            return self.ask("/completion", {"prompt": prompt, "n_predict": 1})[0]
        except urllib.error.HTTPError as error:
            return str(error.headers["X-Replica"])

    def text_of(self, prompt: str) -> str:
        body = {"prompt": prompt, "n_predict": N_PREDICT, "temperature": 0, "ignore_eos": True}
        return str(self.ask("/completion", body)[1]["content"])


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    with ExitStack() as stack:
        yield Setting(tmp_path, stack)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    """For tests that only ask."""
    with ExitStack() as stack:
        yield Setting(tmp_path_factory.mktemp("replicas"), stack)


def expected(setting: Setting) -> dict[str, str]:
    """The texts of a server without a router."""
    port = setting.ports["replica2"]
    return {prompt: str(complete(port, N_PREDICT, prompt)["content"]) for prompt in PROMPTS}


def ask_many(setting: Setting, on_done: Callable[[int], None]) -> list[str | Exception]:
    """N_REQUESTS texts, or what went wrong, in order; `on_done` hears once of each number of them."""
    n_done, lock = itertools.count(1), threading.Lock()

    def ask(i: int) -> str | Exception:
        try:
            return setting.text_of(PROMPTS[i % len(PROMPTS)])
        except Exception as error:
            return error
        finally:
            with lock:
                on_done(next(n_done))

    with ThreadPoolExecutor(N_CLIENTS) as clients:
        return list(clients.map(ask, range(N_REQUESTS)))


def test_a_killed_replica_loses_no_request(setting: Setting) -> None:
    wanted = expected(setting)
    victim = setting.replicas["replica1"]

    def kill_in_the_middle(n_done: int) -> None:
        if n_done == N_REQUESTS // 2:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    pidfd = os.pidfd_open(victim.server_pid)
    texts = ask_many(setting, kill_in_the_middle)
    os.close(pidfd)
    assert texts == [wanted[PROMPTS[i % len(PROMPTS)]] for i in range(N_REQUESTS)]
    assert victim.wait() == 1
    assert setting.count("wretr") > 0  # asked again of the other one
    wait_for("the router to see it", lambda: setting.states() == {"replica1": "DOWN", "replica2": "UP"})


def test_prometheus_finds_all_of_them(shared: Setting) -> None:
    """Every target of the shipped prometheus.yml, on this setting's ports, has the figures of its job."""
    shared.text_of(PROMPTS[0])
    here = {port: shared.ports[name] for name, port in PORTS.items()}
    here |= {port: shared.metrics_ports[name] for name, port in METRICS_PORTS.items()}
    jobs = re.split(r"- job_name: ", (REPLICAS / "prometheus.yml").read_text())[1:]
    found = {}
    for job in jobs:
        for port in map(int, re.findall(r'"127\.0\.0\.1:(\d+)"', job)):
            with urllib.request.urlopen(f"http://{HOST}:{here[port]}/metrics", timeout=30) as response:
                found[port] = (job.splitlines()[0], response.read().decode())
    assert [name for name, _ in found.values()] == [*2 * ["llama-server"], *2 * ["pyspac"], "haproxy"]
    figures = {"llama-server": "llamacpp:", "pyspac": "pyspac_slots", "haproxy": "haproxy_server_status"}
    for name, text in found.values():
        assert f"\n{figures[name]}" in text
    status = found[PORTS["status"]][1]
    assert [replica for replica in shared.replicas if f'server="{replica}"' not in status] == []
    n_answered = [
        int(float(n)) for n in re.findall(r"haproxy_server_http_responses_total.*2xx.* (\S+)", status)
    ]
    assert sum(n_answered) >= 1


def test_a_conversation_stays_with_its_replica(shared: Setting) -> None:
    """The beginning of a prompt decides; other conversations go to both."""
    seen = set()
    for i in range(12):
        messages = [
            {"role": "system", "content": "You answer in one word."},
            {"role": "user", "content": f"Question {i}: what comes after {i}?"},
        ]
        body = {"messages": messages, "max_tokens": 1, "temperature": 0}
        first, answer = shared.ask("/v1/chat/completions", body)
        messages += [answer["choices"][0]["message"], {"role": "user", "content": "And then?"}]
        second, _answer = shared.ask("/v1/chat/completions", body | {"messages": messages})
        assert first == second
        seen.add(first)
    assert seen == {"replica1", "replica2"}


def test_the_end_of_a_long_prompt_does_not_matter(shared: Setting) -> None:
    """Its first 4,096 characters decide. (The demo has no room for so much, and answers with 400.)"""
    for i in range(6):
        prompt = f"Chapter {i}. " + "It was a dark night. " * 200
        places = {shared.place_of(prompt + end) for end in ("a", "b", "c")}
        assert len(places) == 1
    assert len({shared.place_of(f"Chapter {i}") for i in range(12)}) == 2


def test_a_rolling_restart_loses_no_request(setting: Setting) -> None:
    """Both replicas are replaced while clients ask; what the old ones learned is there for the new ones."""
    wanted = expected(setting)
    before = dict(setting.replicas)
    marks = setting.folder / "marks"
    marks.mkdir()
    # the command leaves a mark for us, who own the processes, and waits until it is gone
    command = f"touch {marks}/$1; while [ -e {marks}/$1 ]; do sleep 0.1; done"
    script = subprocess.Popen(
        [str(REPLICAS / "rolling-restart.sh"), "replica1", "replica2"],
        env={"PATH": "/usr/bin:/bin", "RESTART": command, "STATUS": setting.status_url, "WAIT_S": "100"},
    )
    setting.stack.callback(script.kill)
    wrong: list[object] = []
    n_asked = 0

    def ask() -> None:
        nonlocal n_asked
        while script.poll() is None:
            prompt = PROMPTS[n_asked % len(PROMPTS)]
            n_asked += 1
            try:
                text = setting.text_of(prompt)
            except Exception as error:
                wrong.append(error)
            else:
                wrong.extend([] if text == wanted[prompt] else [text])

    clients = [threading.Thread(target=ask) for _ in range(N_CLIENTS)]
    for client in clients:
        client.start()
    while script.poll() is None:
        for mark in list(marks.iterdir()):
            assert setting.replicas[mark.name].stop() == 0
            setting.replicas[mark.name] = setting.start(mark.name)
            mark.unlink()
        for replica in setting.replicas.values():
            replica.check_alive()
        time.sleep(0.05)
    for client in clients:
        client.join(60)
    assert script.returncode == 0
    assert wrong == []
    assert n_asked > 50
    for name, replica in setting.replicas.items():
        assert replica is not before[name]
        replica.wait_ready()
        assert any("utilities of the last run were loaded" in event["message"] for event in replica.events)


def test_a_rolling_restart_does_not_take_the_last_one_away(setting: Setting) -> None:
    setting.replicas["replica1"].stop()
    wait_for("the router to see it", lambda: setting.states()["replica1"] == "DOWN")
    done = subprocess.run(
        [str(REPLICAS / "rolling-restart.sh"), "replica2"],
        env={"PATH": "/usr/bin:/bin", "RESTART": "false", "STATUS": setting.status_url, "WAIT_S": "1"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert "replica1 is DOWN: stopped before the next restart" in done.stderr
