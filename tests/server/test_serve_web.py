"""Who may use a server, and who may hold it up: other web pages, bodies without a type, idle connections."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from serving import HOST, ONE_THREAD, TARGET, Serve, complete, environment, wait_for

from pyspac._native import bin_dir
from pyspac.server.build_extras import build_extras
from pyspac.server.health import get_json
from pyspac.server.options import ServeOptions
from tools.system_faults import VARIABLE, SystemFaults, prepare

EVIL = "https://evil.example"
BODY = {"prompt": "def parse(", "n_predict": 4}
SOON_S = 4.0  # less than the 5 s after which a connection without a request is closed


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with Serve(tmp_path_factory.mktemp("web"), passed=ONE_THREAD, draft=False) as serve:
        yield serve.wait_ready()


def ask(
    serve: Serve, method: str, path: str, body: str | None = None, **headers: str
) -> tuple[int, dict[str, str], str]:
    """Status, headers (in lower case) and text of the answer."""
    with closing(http.client.HTTPConnection(HOST, serve.port, timeout=60)) as connection:
        connection.request(
            method, path, body, {name.replace("_", "-"): text for name, text in headers.items()}
        )
        response = connection.getresponse()
        return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read().decode()


# ---- other web pages


@pytest.mark.parametrize("origin", [EVIL, "http://localhost:3000", "null"])
def test_no_other_page_is_let_in(served: Serve, origin: str) -> None:
    asked = {"Origin": origin, "Access_Control_Request_Method": "POST"}
    for method in ("OPTIONS", "GET"):
        _, headers, _ = ask(served, method, "/v1/models", **asked)
        assert headers.get("access-control-allow-origin", "") == ""
        assert headers.get("access-control-allow-credentials") != "true"


def test_a_prefix_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was never seen as ready."""
    monkeypatch.setenv("LLAMA_ARG_API_PREFIX", "/sub")
    with Serve(tmp_path, passed=ONE_THREAD, draft=False) as serve:
        assert ask(serve.wait_ready(), "GET", "/sub/health")[0] == 200


@pytest.mark.skipif(not build_extras(bin_dir()).https, reason="built without HTTPS")
@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")
def test_a_server_with_https_is_seen_as_ready(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=elsewhere",
         "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    passed = ("--ssl-key-file", str(key), "--ssl-cert-file", str(certificate), *ONE_THREAD)
    with Serve(tmp_path, passed=passed, draft=False) as serve:
        serve.wait_ready()
        assert any(event.get("url", "").startswith("https:") for event in serve.events)


def test_a_page_is_let_in_by_name(tmp_path: Path) -> None:
    passed = ("--cors-origins", EVIL, *ONE_THREAD)
    with Serve(tmp_path, passed=passed, draft=False) as serve:
        _, headers, _ = ask(serve.wait_ready(), "OPTIONS", "/v1/models", Origin=EVIL)
        assert headers["access-control-allow-origin"] == EVIL


@pytest.mark.parametrize(
    "kind",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""],
)
@pytest.mark.parametrize("path", ["/completion", "/v1/chat/completions", "/slots/0?action=erase"])
def test_what_a_browser_sends_unasked_is_refused(served: Serve, path: str, kind: str) -> None:
    body = json.dumps(BODY)
    if kind.startswith("multipart"):
        body = f'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\n{body}\r\n--x--\r\n'
    sent = {"Content_Type": kind} if kind else {}
    status, _, text = ask(served, "POST", path, body if kind else "", Origin=EVIL, **sent)
    assert status == 415
    assert "Content-Type: application/json" in text


def test_json_is_taken_from_the_servers_own_page(served: Serve) -> None:
    for kind in ("application/json; charset=utf-8", "Application/JSON"):
        sent = {"Origin": served.url, "Content_Type": kind}
        assert ask(served, "POST", "/completion", json.dumps(BODY), **sent)[0] == 200


@pytest.mark.parametrize(("origin", "status"), [(EVIL, 415), ("null", 415), (None, 501), ("own", 501)])
def test_audio_comes_from_the_servers_own_page_alone(served: Serve, origin: str | None, status: int) -> None:
    """Its form is one that a browser sends for any page; 501: this model hears nothing."""
    head = 'Content-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav'
    sent = {"Content_Type": "multipart/form-data; boundary=x"}
    if origin:
        sent["Origin"] = served.url if origin == "own" else origin
    body = f"--x\r\n{head}\r\n\r\nRIFF\r\n--x--\r\n"
    assert ask(served, "POST", "/v1/audio/transcriptions", body, **sent)[0] == status


@pytest.mark.parametrize("body", ['{"prompt": ', "", "not JSON"])
@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_a_body_that_is_no_json_is_a_bad_request(served: Serve, path: str, body: str) -> None:
    status, _, text = ask(served, "POST", path, body, Content_Type="application/json")
    assert status == 400
    assert "invalid_request_error" in text


@pytest.mark.parametrize("path", ["/completion", "/v1/chat/completions"])
def test_json_of_another_form_is_a_bad_request(served: Serve, path: str) -> None:
    assert ask(served, "POST", path, "[]", Content_Type="application/json")[0] == 400


# ---- idle connections


@contextmanager
def at_once(serve: Serve) -> Iterator[None]:
    """Whoever connects meanwhile is seen at the same moment."""
    os.kill(serve.server_pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(serve.server_pid, signal.SIGCONT)


def half_open(stack: ExitStack, port: int, n: int, text: bytes) -> None:
    """Connections whose request never comes, or not all of it."""
    for _ in range(n):
        stack.enter_context(socket.create_connection((HOST, port))).sendall(text)


def slow_reader(stack: ExitStack, port: int) -> None:
    """A client that asks for some megabytes, and reads none."""
    connection = stack.enter_context(socket.socket())
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((HOST, port))
    body = json.dumps({"prompt": "x", "n_predict": 8, "n_probs": 300, "stream": True, "ignore_eos": True})
    head = ("POST /completion HTTP/1.1", "Host: x", "Content-Type: application/json")
    connection.sendall("\r\n".join((*head, f"Content-Length: {len(body)}", "", body)).encode())


@pytest.mark.parametrize(
    "text", [b"", b"POST /completion HTTP/1.1\r\nHost: x\r\n"], ids=["nothing", "half a head"]
)
def test_half_open_connections_hold_nobody_up(served: Serve, text: bytes) -> None:
    with ExitStack() as stack:
        with at_once(served):
            half_open(stack, served.port, 200, text)
        start_s = time.monotonic()
        assert get_json(HOST, served.port, "/health")[0] == 200
        assert complete(served.port, 4)["tokens_predicted"] == 4
        assert time.monotonic() - start_s < SOON_S


def test_threads_of_a_burst_end_while_others_ask(served: Serve) -> None:
    """Of the pool's threads each is woken in turn, so that requests on new connections kept them all busy."""
    server = psutil.Process(served.server_pid)
    with ExitStack() as stack:
        half_open(stack, served.port, 100, b"")
        wait_for("a thread for each", lambda: server.num_threads() > 100)

    def has_few_threads() -> bool:
        for _ in range(50):  # far more than all threads in the 3 s after which an idle one ends
            get_json(HOST, served.port, "/health")
        return server.num_threads() < 50

    wait_for("their end", has_few_threads, 10)


def test_slow_readers_hold_nobody_up(served: Serve) -> None:
    with ExitStack() as stack:
        with at_once(served):
            half_open(stack, served.port, 60, b"POST /completion HTTP/1.1\r\n")
            for _ in range(20):
                slow_reader(stack, served.port)
        start_s = time.monotonic()
        assert get_json(HOST, served.port, "/health")[0] == 200
        assert complete(served.port, 4)["tokens_predicted"] == 4
        assert time.monotonic() - start_s < SOON_S * 2  # the answers before it are computed


def test_no_thread_for_a_connection_ends_no_server(tmp_path: Path) -> None:
    """As with a container's limit of processes: connections wait for a thread that is there."""
    variables = prepare(tmp_path)
    faults = SystemFaults(Path(variables[VARIABLE]))
    with Serve(tmp_path, passed=ONE_THREAD, draft=False, variables=variables) as serve, ExitStack() as stack:
        serve.wait_ready()
        faults.set(thread_every=1)
        half_open(stack, serve.port, 50, b"POST /completion HTTP/1.1\r\n")
        wait_for("threads that cannot be had", lambda: faults.get("n_no_threads") > 0)
        faults.set(thread_every=0)
        stack.close()
        assert complete(serve.port, 4)["tokens_predicted"] == 4


# ---- keys


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_key_shows_nowhere(tmp_path: Path, where: str) -> None:
    """Not in anybody's command line, nor in the log; and it is asked for."""
    key = ("--api-key", "a-secret-key")
    arguments, passed = (key, ()) if where == "before" else ((), key)
    with Serve(tmp_path, *arguments, passed=(*passed, *ONE_THREAD), draft=False) as serve:
        serve.wait_ready()
        parent = psutil.Process(serve.process.pid)
        lines = [" ".join(process.cmdline()) for process in (parent, *parent.children(recursive=True))]
        assert len(lines) >= 3
        assert not [line for line in lines if key[1] in line]
        assert not [event for event in serve.events if key[1] in json.dumps(event)]
        assert ask(serve, "POST", "/completion", json.dumps(BODY), Content_Type="application/json")[0] == 401
        sent = {"Content_Type": "application/json", "Authorization": f"Bearer {key[1]}"}
        assert ask(serve, "POST", "/completion", json.dumps(BODY), **sent)[0] == 200


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("run", ("-p", "x", "-n", "100000", "--ignore-eos", "--", "--api-key=a-secret")),
        ("chat", ("-hft", "a-secret")),
        ("bench", ("-n", "100000", "--api-key", "a-secret")),
    ],
)
def test_a_secret_shows_in_no_command(tmp_path: Path, command: str, flags: tuple[str, ...]) -> None:
    """From its own first instruction on."""
    argv = [sys.executable, "-m", "pyspac", command, str(TARGET), *ONE_THREAD, *flags]
    started = subprocess.Popen(
        argv, env=environment(tmp_path), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    try:
        lines = wait_for("its server", lambda: command_lines_with_server(started.pid))
        assert not [line for line in lines if "a-secret" in line]
    finally:
        started.kill()
        started.communicate()


def command_lines_with_server(pid: int) -> list[str]:
    """Of a process and all below it; none before a server of its own is among them."""
    parent = psutil.Process(pid)
    lines = []
    for process in (parent, *parent.children(recursive=True)):
        with suppress(psutil.Error):  # it has ended
            lines.append(" ".join(process.cmdline()))
    return lines if any(".sock" in line and "llama-server" in line for line in lines) else []


@pytest.mark.parametrize(
    ("host", "passed", "variable", "is_open"),
    [
        ("0.0.0.0", (), None, True),
        ("0.0.0.0", ("--api-key-file", "f"), None, False),
        ("::", (), "LLAMA_API_KEY", False),
        ("192.168.7.1", (), None, True),
        ("127.0.0.1", (), None, False),
        ("localhost", (), None, False),
        ("::1", (), None, False),
    ],
)
def test_a_server_for_everybody_is_named_as_one(
    monkeypatch: pytest.MonkeyPatch, host: str, passed: tuple[str, ...], variable: str | None, is_open: bool
) -> None:
    monkeypatch.delenv("LLAMA_API_KEY", raising=False)
    if variable:
        monkeypatch.setenv(variable, "x")
    assert ServeOptions(model=Path("t"), host=host, passed=passed).is_open == is_open


def test_a_server_for_everybody_says_so(tmp_path: Path) -> None:
    with Serve(tmp_path, "--host", "0.0.0.0", passed=ONE_THREAD, draft=False) as serve:
        wait_for("the server", lambda: serve.event("ready"))
        event = wait_for("the warning", lambda: serve.event("open"))
        assert "LLAMA_API_KEY" in event["message"]
